"""Which engines a config starts, where they listen, and what it says of those that run elsewhere."""

import json

import pytest

from flowjax.launch import machine
from flowjax.launch.checks import check_config
from flowjax.launch.devices import Devices, engine_accelerators, mesh_count, share_out
from flowjax.launch.roles import check_reached, choose_ports, engine_roles, publish_endpoints, run_roles, stop_order
from flowjax.run import resolve

URLS = ("http://one:8000", "http://two:8000")


def _value(role, name: str) -> str:
    return role.argv[role.argv.index(name) + 1]


def test_one_engine_keeps_its_plain_name(config, tmp_path):
    ports = choose_ports(resolve(config))
    assert list(ports) == ["engine", "dataflow"]
    assert [role.name for role in run_roles(resolve(config, tmp_path), ports, Devices())][:2] == ["engine", "dataflow"]


def test_each_replica_is_a_role_with_port_seed_and_accelerators_of_its_own(config, tmp_path):
    config.engine.replicas, config.engine.tensor_parallel, config.seed = 3, 2, 7
    devices = share_out(tuple("01234567"), engine_accelerators(resolve(config)))
    assert (devices.trainer, devices.engine) == (("0", "1"), ("2", "3", "4", "5", "6", "7"))
    ports = choose_ports(resolve(config))
    roles = engine_roles(resolve(config, tmp_path), ports, devices)
    assert [role.name for role in roles] == ["engine-0", "engine-1", "engine-2"]
    assert [role.env["CUDA_VISIBLE_DEVICES"] for role in roles] == ["2,3", "4,5", "6,7"]
    assert [_value(role, "--seed") for role in roles] == ["7", "8", "9"]
    assert [int(_value(role, "--port")) for role in roles] == [ports[role.name] for role in roles]
    assert len(set(ports.values())) == 4
    publish_endpoints(resolve(config, tmp_path), ports)
    endpoints = json.loads((tmp_path / "endpoints.json").read_text())
    assert endpoints == {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


def test_separate_trainers_are_roles_with_accelerators_of_their_own(config, tmp_path):
    config.policies = {"solver": {}, "verifier": {}}
    config.separate_trainers = True
    devices = share_out(tuple("012345"), engine_accelerators(resolve(config)), trainers=2)
    assert (devices.trainer_count, devices.engine) == (2, ("5",))
    roles = {role.name: role for role in run_roles(resolve(config, tmp_path), choose_ports(resolve(config)), devices)}
    assert list(roles) == ["engine", "dataflow", "trainer-solver", "trainer-verifier", "rollout"]
    assert roles["trainer-verifier"].argv[-1] == "--policy=verifier"
    own = [roles[f"trainer-{name}"].env["CUDA_VISIBLE_DEVICES"] for name in ("solver", "verifier")]
    assert own == ["0,1", "2,3"]
    assert stop_order(resolve(config)) == (("rollout", "trainer-solver", "trainer-verifier"),)
    crowded = share_out(("0", "1"), 1, trainers=2)
    assert [crowded.trainer_env(index)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["0", "0"]
    assert crowded.trainer_env(1)["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    config.trainer.processes, config.trainer.coordinator = 2, "here:1"
    assert any("config.separate_trainers is True" in problem for problem in check_config(config))


def test_what_computes_on_cpus_has_tcmalloc_where_it_is_installed(config, tmp_path, monkeypatch):
    def allocators(devices: Devices) -> dict[str, str | None]:
        made = run_roles(resolve(config, tmp_path), choose_ports(resolve(config)), devices)
        return {role.name: role.env.get("LD_PRELOAD") for role in made}

    none = dict.fromkeys(("engine", "dataflow", "trainer", "rollout"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr("flowjax.launch.roles.tcmalloc", lambda: "libtcmalloc_minimal.so.4")
    found = {"engine": "libtcmalloc_minimal.so.4", "trainer": "libtcmalloc_minimal.so.4"}
    assert allocators(Devices()) == none | found
    assert allocators(Devices(trainer=("0",), engine=("1",))) == none
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert allocators(Devices()) == none | dict.fromkeys(found, "libtcmalloc_minimal.so.4:libother.so")
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert allocators(Devices()) == none, "the user's own stays"
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr("flowjax.launch.roles.tcmalloc", lambda: None)
    assert allocators(Devices()) == none


def test_processes_on_a_host_of_tpus_see_their_own_chips(config, tmp_path):
    config.engine.replicas, config.engine.tensor_parallel = 2, 2
    devices = share_out(tuple(f"tpu{chip}" for chip in range(8)), engine_accelerators(resolve(config)), 4)
    assert machine.check_accelerators(resolve(config), devices) == []
    roles = {role.name: role for role in run_roles(resolve(config, tmp_path), choose_ports(resolve(config)), devices)}
    seen = {name: roles[name].env for name in ("trainer", "engine-0", "engine-1")}
    assert [env["TPU_VISIBLE_CHIPS"] for env in seen.values()] == ["0,1,2,3", "4,5", "6,7"]
    assert [env["TPU_CHIPS_PER_PROCESS_BOUNDS"] for env in seen.values()] == ["2,2,1", "1,2,1", "1,2,1"]
    assert len({env["TPU_PROCESS_PORT"] for env in seen.values()}) == 3
    assert not any(name.startswith(("CUDA", "XLA_")) for env in seen.values() for name in env)
    assert not any(name.startswith("TPU_") for name in [*roles["rollout"].env, *roles["dataflow"].env])


def test_a_trainer_with_a_whole_host_of_tpus_may_be_part_of_a_slice():
    whole = share_out(("tpu0", "tpu1", "tpu2", "tpu3"), 0, 8, hosts=2)
    assert (whole.trainer_env(), whole.trainer_count) == ({}, 8)
    part = share_out(("tpu0", "tpu1", "tpu2", "tpu3"), 0, 2)
    assert part.trainer_env()["TPU_VISIBLE_CHIPS"] == "0,1"


def test_an_evaluation_may_have_all_chips_of_a_host_for_its_engine(config):
    config.engine.tensor_parallel = 4
    whole = share_out(("tpu0", "tpu1", "tpu2", "tpu3"), 4)
    assert "would share TPU chips" in machine.check_accelerators(resolve(config), whole)[0]
    config.eval.versions = (7,)
    assert machine.check_accelerators(resolve(config), whole) == []
    assert whole.engine_env(0, 4) == {}


@pytest.mark.parametrize(
    ("changes", "chips", "named"),
    [
        ({}, 1, "the trainer would share TPU chips tpu0 with the engines"),
        ({}, 4, "the trainer gets 3 of 4 TPU chips, but a process has 1, 2, 4, 8 of them"),
        ({"engine.tensor_parallel": 3}, 4, "config.engine.tensor_parallel gets 3 of 4 TPU chips"),
        ({"trainer.processes": 2, "mesh.fsdp": 2}, 4, "config.trainer.processes is 2, but a host of TPUs has one"),
        ({"policy.train": "full", "mesh.fsdp": 2}, 4, "policy.train of agent is 'full', but vllm-tpu cannot take"),
    ],
)
def test_what_a_host_of_tpus_does_not_do(config, monkeypatch, changes, chips, named):
    monkeypatch.delenv("FLOWJAX_PROCESS", raising=False)
    config.update_from_flattened_dict(changes)
    run = resolve(config)
    names = tuple(f"tpu{chip}" for chip in range(chips))
    devices = share_out(names, engine_accelerators(run), mesh_count(tuple(config.mesh.to_dict().values())))
    (problem,) = machine.check_accelerators(run, devices)
    assert named in problem
    assert run_roles(run, choose_ports(run), devices), "a plan is shown with what is refused"


def test_two_trainers_do_not_share_a_tpu_chip(config):
    config.policies = {"solver": {}, "verifier": {}}
    config.separate_trainers = True
    (problem,) = machine.check_accelerators(resolve(config), share_out(("tpu0", "tpu1"), 1, trainers=2))
    assert "share TPU chips tpu0 with the engines or another trainer" in problem


def test_a_configured_port_is_the_first_of_several(config):
    config.engine.port, config.engine.replicas = 8000, 3
    ports = choose_ports(resolve(config))
    assert [ports[f"engine-{index}"] for index in range(3)] == [8000, 8001, 8002]
    config.dataflow.port = 8002
    assert any("8000 (for 3 engines) and 8002" in problem for problem in machine.check_ports(resolve(config)))


def test_engines_elsewhere_are_known_and_not_started(config, tmp_path):
    config.engine.urls = URLS
    config.engine.python = "/no/such/python"  # it is not needed here
    ports = choose_ports(resolve(config))
    assert list(ports) == ["dataflow"]
    devices = share_out(("0", "1"), engine_accelerators(resolve(config)))
    assert (devices.trainer, devices.engine) == (("0", "1"), ())
    assert [role.name for role in run_roles(resolve(config, tmp_path), ports, devices)] == [
        "dataflow",
        "trainer",
        "rollout",
    ]
    assert (
        machine.check_engine(resolve(config).bases["base"])
        == machine.check_accelerators(resolve(config), devices)
        == []
    )
    publish_endpoints(resolve(config, tmp_path), ports)
    endpoints = json.loads((tmp_path / "endpoints.json").read_text())
    assert (endpoints["engine-0"], endpoints["engine-1"]) == URLS
    config.engine.urls = URLS[:1]
    publish_endpoints(resolve(config, tmp_path), ports)
    assert json.loads((tmp_path / "endpoints.json").read_text())["engine"] == URLS[0]


def test_too_few_accelerators_for_all_replicas(config):
    config.engine.replicas, config.engine.tensor_parallel = 2, 2
    (message,) = machine.check_accelerators(
        resolve(config), share_out(("0", "1", "2"), engine_accelerators(resolve(config)))
    )
    assert (
        "replicas is 2 and config.engine.tensor_parallel is 2, which takes 4 accelerators, but there are 3" in message
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine.urls": URLS, "engine.replicas": 2}, "config.engine.replicas is 2, but config.engine.urls names"),
        ({"engine.urls": ("one:8000",)}, "config.engine.urls has 'one:8000': give addresses such as"),
        ({"engine.urls": URLS[:1] * 2}, "an address comes twice"),
        ({"engine.replicas": 0}, "config.engine.replicas is 0: it must be at least 1"),
        ({"rollout.min_concurrent_episodes": 999}, "config.rollout.min_concurrent_episodes is 999, more than"),
        ({"policy.name": "base"}, "a policy is named 'base'"),
        ({"agents": {"solver": "nobody"}}, "config.agents.solver is 'nobody'"),
        ({"agents": {"solver": "base"}}, "nothing is trained"),
        ({"elsewhere": ("engine",)}, "config.elsewhere has 'engine': use one of rollout, trainer, dataflow"),
        ({"elsewhere": ("dataflow", "trainer")}, "leave both to --join"),
        ({"dataflow.url": "http://far:8000"}, "leave both to --join"),
        ({"elsewhere": ("dataflow",), "dataflow.url": "http://far:8000"}, "leave both to --join"),
    ],
)
def test_what_cannot_be(config, changes, message):
    config.update_from_flattened_dict(changes)
    assert any(message in problem for problem in check_config(config)), check_config(config)


def test_a_frozen_agent_beside_a_trained_one_is_fine(config):
    config.agents = {"solver": "agent", "verifier": "base"}
    assert check_config(config) == []


@pytest.mark.parametrize("coordinator", ["", "127.0.0.1:9876", "[::1]:9876", "b:9876"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::", "own-name", "10.0.0.1", "both", "?"])
def test_a_trainer_on_other_hosts_is_not_sent_to_itself(config, monkeypatch, host, coordinator):
    """It waited for a dataflow of its own machine, for ever."""
    names = {"own-name": ["127.0.1.1"], "both": ["127.0.1.1", "10.0.0.1"], "localhost": ["127.0.0.1", "::1"]}

    def look_up(name: str, *_: object, **__: object) -> list[tuple]:
        if name == "?":
            raise OSError("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in names.get(name, [name])]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    config.dataflow.host, config.trainer.coordinator = host, coordinator
    assert check_reached(resolve(config)) == [], "it trains itself"
    config.elsewhere = ("trainer",)
    found = check_reached(resolve(config))
    # On one machine loopback is right: a program of one's own may be the trainer. A name is given for others.
    loopback = host in ("127.0.0.1", "localhost", "0.0.0.0", "::")
    assert len(found) == (host == "own-name" or (loopback and coordinator == "b:9876")), found
    if found:
        assert found[0].startswith(f"config.dataflow.host is {host!r}, by which only this machine finds the ")


@pytest.mark.parametrize(
    ("elsewhere", "started"),
    [
        (("rollout",), ["dataflow", "trainer"]),
        (("trainer",), ["engine", "dataflow", "rollout"]),
        (("rollout", "trainer"), ["dataflow"]),
    ],
)
def test_roles_that_run_elsewhere_are_not_started(config, tmp_path, elsewhere, started):
    config.elsewhere = elsewhere
    assert check_config(config) == []
    ports = choose_ports(resolve(config))
    roles = run_roles(resolve(config, tmp_path), ports, share_out((), engine_accelerators(resolve(config))))
    assert [role.name for role in roles] == started
    assert ("engine" in ports) == ("engine" in started)
