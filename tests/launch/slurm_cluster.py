"""A SLURM cluster of three hosts on this machine: real munged, slurmctld and slurmd, in a folder of their own."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from flowjax.launch.machine import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
# Hosts are called as addresses that this machine has: the first host's name is where JAX looks for process 0.
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
_CONF = """
ClusterName=flowjax-test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=5
ReturnToService=2
SchedulerParameters=sched_interval=2
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What a cluster needs and this machine lacks."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return lacking + ([] if os.geteuid() == 0 else ["root"])


class Slurm:
    """The cluster, up while the context lasts; every job ends with it."""

    def __init__(self, folder: Path):
        self.folder, self._daemons = folder, []
        self.env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        folder = self.folder
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = os.uname().nodename.partition(".")[0]
        node = "NodeName={} NodeAddr=127.0.0.1 NodeHostname={} Port={} CPUs=8 State=UNKNOWN"
        nodes = "\n".join(node.format(name, host, free_port()) for name in NODES)
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, controller=free_port(), nodes=nodes))
        socket = folder / "munge.socket"
        files = [f"--{name}={folder / f'munge.{name}'}" for name in ("pid-file", "log-file", "seed-file")]
        self._start("munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", *files)
        self._until(socket.exists, "munged")
        self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._until(lambda: self.call("sinfo", "-h", "-o", "%T %D").strip() == f"idle {len(NODES)}", "the nodes")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.call("scancel", "--user=root", check=False)
        until = time.monotonic() + 60
        while self.call("squeue", "-h", check=False) and time.monotonic() < until:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(timeout=60)

    def call(self, *command: str, check: bool = True, **env: str) -> str:
        done = subprocess.run(command, env=self.env | env, capture_output=True, text=True, timeout=300, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """State of a job: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        shown = self.call("scontrol", "show", "job", "--oneliner", job)
        return shown.partition("JobState=")[2].split()[0]

    def logs(self) -> str:
        ends = [(path.name, path.read_text(errors="replace")[-2000:]) for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(f"== {name}\n{text}" for name, text in ends)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self._daemons)}.out.log").open("w") as out:
            self._daemons.append(subprocess.Popen(command, env=self.env, stdout=out, stderr=subprocess.STDOUT))

    def _until(self, ready, what: str) -> None:
        until = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < until and all(d.poll() is None for d in self._daemons), f"{what}: {self.logs()}"
            time.sleep(0.2)
