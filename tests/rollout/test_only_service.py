"""A run has one rollout service: a second one is refused, whoever follows one that was killed is not."""

import os
import signal
import subprocess
import sys

import pytest

from flowjax.config import ConfigError
from flowjax.rollout import __main__ as role

HOLDS = """
import os, pathlib, sys, time
from flowjax.rollout.__main__ import only_service
with only_service(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(60); os._exit(0)
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_second_service_is_refused_until_the_first_is_gone(tmp_path, monkeypatch):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "holds\n"
        monkeypatch.setattr(role, "_HANDOVER_S", 0.0)
        with (
            pytest.raises(ConfigError, match=rf"another rollout service \(process {first.pid} on .*stop that one"),
            role.only_service(tmp_path),
        ):
            pass
        first.kill()  # as kill -9 does; the child that it forked lives on
        assert first.wait() == -signal.SIGKILL
        with role.only_service(tmp_path):
            pass
    finally:
        os.killpg(first.pid, signal.SIGKILL)
