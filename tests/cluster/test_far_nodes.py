"""Nodes far away, on lines of 300 ms there and back that lose packets: they join, die, are cut off, and come back."""

import shlex
import signal
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from light_node import Node, started, wait_for
from light_run import LightRun
from link import Link, obstacle

from flowjax.launch.__main__ import main
from flowjax.monitor.metrics import read_metrics
from flowjax.run import read_endpoints
from tests.integration.whole_run_checks import assert_documented, assert_tasks_ended, assert_trained_once
from tests.nats_server import nats_server

STEPS, LEASE_S = 200, 40.0


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(reason := obstacle()), reason=reason)
def test_a_run_goes_on_with_the_nodes_that_reach_it(tmp_path):
    """One joins late, one is killed, one is cut off for longer than its leases last. Nothing is trained on twice."""
    options: dict[str, Any] = {"trainer__steps": STEPS, "dataflow__lease_s": LEASE_S, "elsewhere": ("rollout",)}
    options |= {"dataflow__host": "0.0.0.0", "dataflow__max_staleness": 2}  # beyond loopback: keys are asked for
    far = ("berlin", "lima", "tokyo")
    with Link(["run", *far], delay_s=0.15, loss=0.01, rate_bits_per_s=50e6) as link, started() as processes:
        light = LightRun(tmp_path, on=link.on("run"), **options)
        run = light.launch()
        processes.append(run)
        processes.extend(light.start_engine(*link.on(leaf)) for leaf in far)

        def trained() -> int:
            assert run.poll() is None, light.logs()
            lines = read_metrics(light.run_dir) if light.run_dir.exists() else []
            return max((line["step"] for line in lines if line["kind"] == "train"), default=0)

        def join(leaf: str) -> Node:
            port = urlsplit(read_endpoints(light.run_dir)["dataflow"]).port
            node = Node(light, f"http://{link.address('run', seen_by=leaf)}:{port}", leaf, on=link.on(leaf))
            processes.append(node.process)
            return node

        wait_for(lambda: "serving on" in light.logs() or run.poll() is not None, light.logs)
        assert run.poll() is None, light.logs()
        berlin, lima = join("berlin"), join("lima")

        def logs() -> str:
            return light.logs() + berlin.logs() + lima.logs()

        wait_for(lambda: trained() >= 5 or berlin.process.poll() is not None, logs)
        assert trained() >= 5, logs()
        tokyo = join("tokyo")
        wait_for(lambda: tokyo.episodes > 0 or tokyo.process.poll() is not None, tokyo.logs)
        link.cut("lima")
        before = lima.episodes
        berlin.process.send_signal(signal.SIGKILL)  # its guards end the roles
        # Whoever of the others had leases has lost them, and tokyo has played these episodes, too.
        cut_s, step = time.monotonic(), trained()
        wait_for(lambda: time.monotonic() - cut_s > LEASE_S and trained() > step + 2, lambda: logs() + tokyo.logs())
        link.cut("tokyo")
        link.mend("lima")
        wait_for(lambda: lima.episodes > before, logs)
        link.mend("tokyo")
        wait_for(lambda: run.poll() is not None, logs, 600.0)
        assert run.returncode == 0, light.logs() + tokyo.logs()
        for node in (lima, tokyo):
            assert node.process.wait(timeout=120) == 0, node.logs()
            assert "the run has ended" in node.output.read_text()
    lines = read_metrics(light.run_dir)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, STEPS + 1)), "each version once"
    assert_tasks_ended(light.run_dir)
    assert_trained_once(light.run_dir)
    assert_documented(light.run_dir)


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(reason := obstacle()), reason=reason)
def test_a_run_and_nodes_that_reach_nothing_but_a_nats_server(tmp_path, capsys):
    """The server is in the middle; run and nodes have a line to it each, and none to each other. A node is killed, then
    nobody reaches the run for longer than leases last."""
    steps, lease_s = 60, 45.0  # a node waits for its run for twice as long, part of which its connections take
    options: dict[str, Any] = {"trainer__steps": steps, "dataflow__lease_s": lease_s, "elsewhere": ("rollout",)}
    hosts = ["nats", "run", "berlin", "lima"]
    with (
        Link(hosts, delay_s=0.075, loss=0.01, rate_bits_per_s=50e6) as link,
        nats_server(host="0.0.0.0", on=link.on("nats")) as server,
        started() as processes,
    ):

        def seen_by(leaf: str) -> str:
            return f"nats://{link.address('nats', seen_by=leaf)}:{server.port}"

        light = LightRun(tmp_path, on=link.on("run"), dataflow__relay=seen_by("run"), **options)
        run = light.launch()
        processes.append(run)
        processes.extend(light.start_engine(*link.on(leaf)) for leaf in ("berlin", "lima"))

        def trained() -> int:
            assert run.poll() is None, light.logs()
            lines = read_metrics(light.run_dir)
            return max((line["step"] for line in lines if line["kind"] == "train"), default=0)

        def join(leaf: str) -> Node:
            assert main([f"--status={light.run_dir}", f"--invite={leaf}"]) == 0
            printed = shlex.split(capsys.readouterr().out)[-1].removeprefix("--join=")
            node = Node(light, printed.replace(seen_by("run"), seen_by(leaf)), leaf, on=link.on(leaf))
            processes.append(node.process)
            return node

        wait_for(lambda: "nodes join by" in light.logs() or run.poll() is not None, light.logs)
        assert run.poll() is None, light.logs()
        berlin, lima = join("berlin"), join("lima")

        def logs() -> str:
            return light.logs() + berlin.logs() + lima.logs()

        wait_for(lambda: berlin.episodes > 0 and lima.episodes > 0 and trained() > 2, logs)
        berlin.process.send_signal(signal.SIGKILL)  # its guards end the roles
        link.cut("run")
        cut_s = time.monotonic()
        wait_for(lambda: time.monotonic() - cut_s > lease_s + 5, logs)
        link.mend("run")
        before = lima.episodes
        wait_for(lambda: lima.episodes > before, logs)
        wait_for(lambda: run.poll() is not None, logs, 600.0)
        assert run.returncode == 0, logs()
        assert lima.process.wait(timeout=120) == 0, lima.logs()
    lines = read_metrics(light.run_dir)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, steps + 1)), "each version once"
    assert_tasks_ended(light.run_dir)
    assert_trained_once(light.run_dir)
    assert_documented(light.run_dir)
