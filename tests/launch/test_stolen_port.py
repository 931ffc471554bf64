"""A port that another process takes while a run lasts."""

import asyncio
import errno
import json
import socket
import sys
from dataclasses import replace

import pytest
from test_supervisor import wait_until

from flowjax.broker import Address, DataflowError, connect
from flowjax.launch.devices import Devices
from flowjax.launch.machine import free_port
from flowjax.launch.roles import choose_ports, publish_endpoints, run_roles
from flowjax.launch.supervisor import Role, Supervisor
from flowjax.run import resolve

# Answers every message with the port it listens at, and dies of one that says so.
SERVER = """
import json, sys
from aiohttp import web
from pathlib import Path
from urllib.parse import urlsplit
from flowjax.records import pack

async def message(request):
    if "die" in request.path:
        sys.exit(1)
    return web.Response(body=pack({"port": port}))

port = urlsplit(json.loads(Path(sys.argv[1], "endpoints.json").read_text())["dataflow"]).port
app = web.Application()
app.router.add_post("/{name}", message)
web.run_app(app, host="127.0.0.1", port=port, print=None)
"""


def roles(config, run_dir, ports) -> dict[str, Role]:
    return {role.name: role for role in run_roles(resolve(config, run_dir), ports, Devices())}


def taken(port: int) -> socket.socket:
    thief = socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    thief.bind(("127.0.0.1", port))
    thief.listen()
    return thief


def test_a_server_starts_anew_elsewhere_and_says_so(config, tmp_path):
    ports = choose_ports(resolve(config))
    publish_endpoints(resolve(config, tmp_path), ports)
    made, before = roles(config, tmp_path, ports), dict(ports)
    for name in ("dataflow", "engine"):
        again = made[name].again
        assert again is not None
        assert again()[1] == "", "nobody has taken it"
        with taken(before[name]):
            role, news = again()
        assert ports[name] != before[name] and str(before[name]) in news and str(ports[name]) in news
        endpoints = json.loads((tmp_path / "endpoints.json").read_text())
        assert endpoints[name] == f"http://127.0.0.1:{ports[name]}"
        assert role.health is not None and role.again is not None
    assert made["engine"].again is not None and str(ports["engine"]) in made["engine"].again()[0].argv
    assert made["rollout"].again is made["trainer"].again is None


def test_a_configured_port_is_waited_for(config, tmp_path):
    config.dataflow.port = free_port()
    ports = choose_ports(resolve(config))
    with taken(ports["dataflow"]):
        config.dataflow.host = "127.0.0.2"
        other = roles(config, tmp_path, ports)["dataflow"].again
        assert other is not None and other()[1] == "", "it is taken at another address alone"
    config.dataflow.host = "127.0.0.1"
    again = roles(config, tmp_path, ports)["dataflow"].again
    assert again is not None
    with taken(ports["dataflow"]), pytest.raises(OSError) as caught:
        again()
    assert caught.value.errno == errno.EADDRINUSE
    assert again()[1] == ""


def test_who_asks_follows_a_dataflow_that_has_moved(config, tmp_path):
    ports, events = choose_ports(resolve(config)), []
    publish_endpoints(resolve(config, tmp_path), ports)
    (tmp_path / "server.py").write_text(SERVER)

    def as_server(role: Role) -> Role:
        def again():
            assert role.again is not None
            other, news = role.again()
            return as_server(other), news

        command = [sys.executable, str(tmp_path / "server.py"), str(tmp_path)]
        return replace(role, argv=command, again=again, health=None)

    async def main():
        supervisor = Supervisor(tmp_path / "logs", on_event=lambda *event: events.append(event), backoff_s=3.0)
        supervisor.start(as_server(roles(config, tmp_path, ports)["dataflow"]))
        first = ports["dataflow"]
        async with connect(Address(tmp_path, "dataflow")) as broker:
            assert (await broker.call("status", {}, away_s=120.0))["port"] == first
            with pytest.raises(DataflowError, match="has not answered"):
                await broker.call("die", {}, away_s=0.0)
            await wait_until(lambda: any(event == "down" for _, event, _ in events))
            with taken(first):
                await wait_until(lambda: any(event == "moved" for _, event, _ in events))
                moved = (await broker.call("status", {}, away_s=120.0))["port"]
        assert moved == ports["dataflow"] != first
        await supervisor.stop(grace_s=10)

    asyncio.run(main())


def test_the_last_known_address_counts_while_the_file_cannot_be_read(tmp_path):
    path = tmp_path / "endpoints.json"
    path.write_text(json.dumps({"dataflow": "http://a:1"}))
    address = Address(tmp_path, "dataflow")
    path.write_text("{")
    assert address() == "http://a:1"
    path.write_text(json.dumps({"dataflow": "http://b:2"}))
    assert address() == "http://b:2"
