"""What is refused of the modules that a config names, for each policy."""

import re

import pytest

from configs.math_pair import get_config
from flowjax.launch.probe import inspect_run
from flowjax.run import resolve


def problems(**changes) -> list[str]:
    config = get_config("nano")
    config.model.path = ""
    config.update_from_flattened_dict(changes)
    return inspect_run(resolve(config), 1, None)["problems"]


def test_a_reward_may_read_what_the_workflow_adds_to_the_worlds_outcomes():
    assert not any("reward" in problem for problem in problems())


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        (
            "reward",
            {"components": {"verdikt": 1.0}},
            "config.policies.verifier.reward.components.verdikt does not exist",
        ),
        (
            "reward",
            {"components": {"overlong": {"limit_tokens": 4.0}}},
            "config.policies.verifier.reward.components.overlong.buffer_tokens is missing",
        ),
        ("credit", {"name": "grpoo"}, "grpoo"),
        ("loss", {"kind": "ppoo"}, "ppoo"),
    ],
)
def test_what_one_policy_has_of_its_own_is_checked_under_its_name(section, value, message):
    config = get_config("nano")
    config.model.path = ""
    config.policies.verifier[section] = value
    (found,) = inspect_run(resolve(config), 1, None)["problems"]
    assert message in found
    assert f"config.policies.verifier.{section}" in found


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ({"greso": {"windw": 3}}, r"config.dataflow.algorithms.greso.windw is no option .*did you mean 'window'\?"),
        ({"greso": {"window": 3.5}}, "config.dataflow.algorithms.greso.window is 3.5: give a whole number"),
        ({"gresso": {}}, "config.dataflow.algorithms.gresso is no data algorithm"),
        (
            {"mine": {"path": "no.such:Thing"}},
            "config.dataflow.algorithms.mine.path is 'no.such:Thing', which cannot be imported",
        ),
        (
            {"mine": {"path": "json:JSONDecoder"}},
            "config.dataflow.algorithms.mine.path is json:JSONDecoder, .*Algorithm",
        ),
        ({"mine": {"path": "tests.dataflow.own_algorithm:Forgets"}}, r"config.dataflow.algorithms.mine.state .*set"),
    ],
)
def test_data_algorithms_that_cannot_be_made_are_refused(algorithms, message):
    (found,) = problems(**{"dataflow.algorithms": algorithms})
    assert re.search(message, found)


def test_outcomes_of_another_workflow_are_not_there():
    (found,) = problems(workflow="flowjax.workflows.single:play")
    assert "needs the outcome 'answer_right'" in found
