"""docs/dataflow.md: its tables name what there is, and its examples take part in a run."""

import asyncio
import dataclasses
import inspect
import json
import random
import re
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import TestServer

from flowjax import records
from flowjax.config import default_config
from flowjax.dataflow.algorithms import BUILT_IN, build_algorithms
from flowjax.dataflow.server import Server
from tests.dataflow.test_algorithms import PASS_RATES, Population
from tests.dataflow.test_flow import configuration, make_flow

PAGE = (Path(__file__).parents[2] / "docs" / "dataflow.md").read_text(encoding="utf-8")
STEPS = 3


def table(first: str) -> dict[str, list[str]]:
    """The rows under a header that begins with `first`, by their first cells."""
    lines = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_all_data_algorithms_and_their_options_are_listed():
    listed = table("name")
    assert list(listed) == list(BUILT_IN)
    for name, (hook, _, options) in listed.items():
        config = default_config()
        config.dataflow.algorithms = {name: {"limit_tokens": 8} if name == "overlong_filter" else {}}
        kind = type(build_algorithms(config)[name])
        assert set(hook.split(", ")) <= set(vars(kind))
        assert set(re.findall(r"`(\w+)`", options)) == set(inspect.signature(kind).parameters) - {"seed"}


@pytest.mark.parametrize("name", ["Lease", "Task", "Episode", "Trajectory", "Turn", "TokenRow"])
def test_all_fields_of_records_are_listed(name):
    (text,) = table("record")[name]
    missing = {f.name for f in dataclasses.fields(getattr(records, name))} - set(re.findall(r"`(\w+)`", text))
    assert not missing


def test_the_example_of_a_data_algorithm_works(tmp_path):
    example = re.search(r"    from flowjax\.dataflow\.alg\w+ import (?:.+\n|\n+    )+", PAGE) or pytest.fail(
        "no example"
    )
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example[0]), names)
    population = Population(tmp_path, {})
    population.flow.algorithms.by_name["mine"] = names["OnlyHard"](seed=0, threshold=0.2)
    for _ in range(15):
        population.step()
    early = dict(population.played)
    for _ in range(10):
        population.step()
    late = {rate: population.played[rate] - early[rate] for rate in PASS_RATES}
    assert late[1.0] == 0 < late[0.0]


def test_the_examples_of_a_rollout_service_and_a_trainer_finish_a_run(tmp_path):
    """As they stand on the page, over HTTP; what they leave to the reader is a coin and a counter."""
    config = configuration(max_staleness=1)
    config.trainer.steps = STEPS
    flow, trained = make_flow(tmp_path, config), []
    service, trainer = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

    def sample(task: Any, version: int, temperature: float) -> tuple[list[int], list[int], list[float], bool]:
        del task, version, temperature
        return [1, 2, 3], [4, 5], [-0.5, -0.25], random.random() < 0.5

    def train(rows: list[Any], version: int) -> None:
        trained.append(len(rows))
        publish(version)

    def publish(version: int) -> None:
        (tmp_path / "mine" / "checkpoints" / "agent" / str(version)).mkdir(parents=True)

    def first(seconds: float) -> None:
        del seconds
        publish(0)
        (tmp_path / "mine" / "checkpoints" / "agent" / "1.orbax-checkpoint-tmp").mkdir()

    async def main() -> None:
        server = TestServer(Server(flow).application())
        async with server:
            url = str(server.make_url("")).rstrip("/")
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / "endpoints.json").write_text(json.dumps({"dataflow": url}))
            names = {"sample": sample, "train": train}
            exec(service, names)
            exec(trainer, names)
            names["RUN"] = tmp_path / "mine"
            names["time"] = Mock(sleep=Mock(side_effect=first))  # the service starts before there is a version
            await asyncio.gather(asyncio.to_thread(names["serve"]), asyncio.to_thread(names["run"], STEPS))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert trained == [config.trainer.groups_per_step * config.rollout.group_size] * STEPS
    assert flow.finished
