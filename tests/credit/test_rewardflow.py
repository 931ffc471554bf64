"""RewardFlow: golden values of the published code, and each of its faults beside the fixed behaviour."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from credit_tables import Path, paths_table

from flowjax.credit.estimators import estimate
from flowjax.credit.rewardflow import reference_compatible, rewardflow, state_values, step_credit
from flowjax.credit.states import TextStep, alfworld_keys, search_keys, webshop_keys
from flowjax.credit.values import Graph, decayed_values, optimal_values, pagerank_values

_VALUE_OPTIONS = inspect.signature(state_values).parameters


def graph(*edges: tuple[int, int], nodes: int) -> Graph:
    source, target = (jnp.array(ends) for ends in zip(*edges, strict=True))
    return Graph(source, target, jnp.ones(len(edges), bool), nodes)


def credits(table, *, gamma=0.9, **options):
    """Values before and after each turn, and its step credit."""
    found = state_values(table, gamma=gamma, **{k: v for k, v in options.items() if k in _VALUE_OPTIONS})
    rest = {k: v for k, v in options.items() if k in ("step_shaping", "final_step_reward")}
    turns = int(np.asarray(table.mask).sum())
    arrays = found.before, found.after, step_credit(table, found, gamma=gamma, **rest)
    return tuple(np.asarray(array)[:turns] for array in arrays)


def old(table, **options):
    return credits(table, **{**reference_compatible(), **options})


# Golden values of the published functions.


@pytest.mark.parametrize(
    ("edges", "base", "expected"),
    [
        ([(0, 1), (1, 2), (2, 3)], [0, 0, 0, 10], [7.29, 8.1, 9, 10]),
        ([(0, 1), (1, 0), (1, 2)], [0, 0, 10], [8.1, 9, 10]),
        ([(0, 1), (1, 2), (2, 3)], [-0.1, -0.1, -0.1, 10.9], [7.9461, 8.829, 9.81, 10.9]),
        ([(0, 1), (1, 2), (2, 3)], [0, -0.1, -0.1, -0.1], [0, -0.081, -0.09, -0.1]),
        ([(0, 1), (1, 2), (2, 1)], [0, -0.1, -0.1], [0, 0, 0]),
    ],
)
def test_decayed_values(edges, base, expected):
    values = decayed_values(graph(*edges, nodes=len(base)), jnp.array(base, jnp.float32), gamma=0.9)
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-30)


def test_sokoban_win_in_three_as_published():
    table = paths_table([Path([0, 1, 2, 3], [-0.1, -0.1, 10.9]), Path([0, 4, 5, 6, 7], [-0.1] * 4, terminal=False)])
    before, after, credit = old(table)
    np.testing.assert_allclose(before[:3], [7.9461, 8.829, 9.81], rtol=1e-6)
    np.testing.assert_allclose(after[2], 10.9, rtol=1e-6)
    np.testing.assert_allclose(credit[:3], [0.8829, 0.981, 1.09], rtol=1e-5)


def test_sokoban_failure_as_published():
    still_running = Path([8, 9, 10, 11, 12], [0.0] * 4, terminal=False, group=1)
    chain = paths_table([Path([0, 1, 2, 3], [-0.1] * 3, terminal=False), still_running])
    before, after, _ = old(chain)
    np.testing.assert_allclose([*before[:3], after[2]], [0, -0.081, -0.09, -0.1], rtol=1e-6)
    looped = paths_table([Path([0, 1, 2, 1], [-0.1] * 3, terminal=False), still_running])
    before, after, _ = old(looped)
    np.testing.assert_allclose([*before[:3], after[2]], [0, 0, 0, 0], atol=1e-30)


# Fault 1: WebShop cannot run, because what its keys are made of is never stored.

_SHOP = [
    TextStep("home", "search[mug]", "results", clickables=["back to search", "b01"]),
    TextStep("results", "click[b01]", "item", clickables=["back to search", "red", "blue", "buy now"]),
    TextStep("item", "click[red]", "item", clickables=["back to search", "red", "blue", "buy now"],
             options={"color": ["red", "blue"]}),
    TextStep("item", "click[buy now]", "done", clickables=["search"],
             options={"color": ["red", "blue"]}, terminal=True),
]  # fmt: skip


def test_webshop_keys_without_stored_clickables():
    forgetful = [TextStep(s.observation, s.action, s.next_observation, options=s.options) for s in _SHOP]
    with pytest.raises(KeyError, match="infos"):
        webshop_keys(forgetful, reference_compatible=True)
    keys = webshop_keys(forgetful)
    assert list(keys.before[1:]) == list(keys.after[:-1])
    assert len({*keys.before, keys.after[-1]}) == 5


# Fault 2: chosen options are in the graph, but values are looked up without them.


def _shop_path(keys) -> Path:
    ids = {key: index for index, key in enumerate(dict.fromkeys([keys.before[0], *keys.after, *keys.before]))}
    states = [ids[key] for key in [keys.before[0], *keys.after]]
    return Path(states, [0, 0, 0, 10.0], lookup=[ids[key] for key in keys.before])


def test_webshop_option_click_earns_its_share():
    still_running = Path([20, 21, 22, 23, 24, 25], [0.0] * 5, terminal=False, group=1)
    published = paths_table([_shop_path(webshop_keys(_SHOP, reference_compatible=True)), still_running])
    np.testing.assert_allclose(old(published)[2][:4], [0.729, 0.81, 0, 1.9], rtol=1e-5, atol=1e-6)
    fixed = paths_table([_shop_path(webshop_keys(_SHOP)), still_running])
    np.testing.assert_allclose(credits(fixed, step_shaping="difference")[2][:4], [0.729, 0.81, 0.9, 1.0], rtol=1e-5)


def test_webshop_options_do_not_depend_on_the_order_of_clicks():
    options = {"color": ["red"], "size": ["xl"]}

    def click(*values):
        clickables = ["red", "xl", "buy now"]
        return [TextStep("item", f"click[{v}]", "item", clickables=clickables, options=options) for v in values]

    there, back = click("red", "xl"), click("xl", "red")
    assert webshop_keys(there).after[-1] == webshop_keys(back).after[-1]
    old_there, old_back = (webshop_keys(clicks, reference_compatible=True) for clicks in (there, back))
    assert old_there.after[-1] != old_back.after[-1]


def test_webshop_options_survive_a_sub_page():
    options = {"color": ["red"]}
    page = ["red", "description", "buy now"]
    steps = [
        TextStep("item", "click[red]", "item", clickables=page, options=options),
        TextStep("item", "click[description]", "text", clickables=["< prev"], options=options),
        TextStep("text", "click[< prev]", "item", clickables=page, options=options),
    ]
    fixed, published = webshop_keys(steps), webshop_keys(steps, reference_compatible=True)
    assert fixed.after[2] == fixed.after[0]
    assert published.after[2] != published.after[0]


# Fault 3: ALFWorld pairs an observation with the inventory of one action later.


def _kitchen(*rest: tuple[str, str, str], takes: bool) -> list[TextStep]:
    """Both go to the shelf; one takes the mug there, the other leaves it. `rest`: action, observation, inventory."""
    carried = "You are carrying: a mug 1." if takes else "You are not carrying anything."
    nothing = "You are not carrying anything."
    steps = [TextStep("room", "go to shelf 1", "shelf", nothing, nothing)]
    steps.append(TextStep("shelf", "take mug 1" if takes else "examine shelf 1", "after", nothing, carried))
    shown, held = "after", carried
    for action, observation, inventory in rest:
        steps.append(TextStep(shown, action, observation, held, inventory))
        shown, held = observation, inventory
    return steps


def test_alfworld_same_state_and_action_get_the_same_credit():
    carrying = "You are carrying: a mug 1."
    win = _kitchen(("a", "o3", carrying), ("b", "o4", carrying), ("c", "o5", carrying), ("d", "o6", ""), takes=True)
    win[-1] = TextStep(**{**vars(win[-1]), "terminal": True})
    nothing = "You are not carrying anything."
    lost = _kitchen(*[(f"x{i}", f"w{i}", nothing) for i in range(5)], takes=False)

    def table(reference):
        names: dict[int, int] = {}
        paths = []
        for steps, reward in ((win, 10.0), (lost, 0.0)):
            keys = alfworld_keys(steps, reference_compatible=reference)
            states = [names.setdefault(key, len(names)) for key in [keys.before[0], *keys.after]]
            rewards = [0.0] * (len(steps) - 1) + [reward]
            paths.append(Path(states, rewards, terminal=reward > 0))
        return paths_table(paths)

    published = old(table(True))[2]
    np.testing.assert_allclose(published[:6], [0.590, 0.656, 0.729, 0.81, 0.9, 1.0], atol=6e-4)
    np.testing.assert_allclose(published[6:9], [-5.314, 0, 0], atol=6e-4)
    fixed = credits(table(False), step_shaping="difference")[2]
    assert fixed[6] == fixed[0] > 0
    assert fixed[7] < 0 < fixed[1]


def test_alfworld_remembers_that_an_object_is_hot():
    carrying = "You are carrying: a mug 1."
    steps = [
        TextStep("kitchen", "heat mug 1", "You heat the mug 1 using the microwave 1.", carrying, carrying),
        TextStep("You heat the mug 1 using the microwave 1.", "go to shelf 1", "shelf", carrying, carrying),
        TextStep("shelf", "look", "shelf", carrying, carrying),
    ]
    cold = [TextStep("kitchen", "go to shelf 1", "shelf", carrying, carrying)]
    assert alfworld_keys(steps).after[1] != alfworld_keys(cold).after[0]
    published = alfworld_keys(steps, reference_compatible=True)
    assert published.after[1] == alfworld_keys(cold, reference_compatible=True).after[0]


# Fault 4: a success at the last allowed step is not in the graph.


def test_success_at_the_last_allowed_step():
    table = paths_table([Path([0, 1, 2, 3, 4], [0, 0, 0, 10.0])])
    np.testing.assert_allclose(old(table)[2], [0, 0, 0, 10])
    before, after, credit = credits(table, step_shaping="difference")
    np.testing.assert_allclose([*before, after[3]], [6.561, 7.29, 8.1, 9, 10], rtol=1e-6)
    np.testing.assert_allclose(credit, [0.729, 0.81, 0.9, 1.0], rtol=1e-5)


# Fault 5: right, wrong and unreadable answers end in the same state.


def _question(*answers: bool, reference: bool):
    paths = []
    for right in answers:
        steps = [TextStep("question", "search", "result"), TextStep("result", "answer", "", terminal=True)]
        keys = search_keys(steps, reference_compatible=reference)
        ids = {key: index for index, key in enumerate([*keys.before, keys.after[-1]])}
        paths.append(Path([ids[k] for k in [keys.before[0], *keys.after]], [0, float(right)]))
    paths.append(Path([90, 91, 92, 93], [0.0] * 3, terminal=False, group=1))
    return paths_table(paths)


def test_search_answers_as_published_depend_on_their_order():
    np.testing.assert_allclose(old(_question(True, False, reference=True))[2][:4], [0.09, 0.1, 0.09, 0.1], rtol=1e-5)
    np.testing.assert_allclose(old(_question(False, True, reference=True))[2][:4], 0.0)


def test_search_wrong_answer_earns_nothing():
    right_first = credits(_question(True, False, reference=False), step_shaping="difference")[2][:4]
    wrong_first = credits(_question(False, True, reference=False), step_shaping="difference")[2][:4]
    np.testing.assert_allclose(right_first, [0.09, 0.1, 0.09, -0.9], rtol=1e-5)
    np.testing.assert_allclose(wrong_first, [0.09, -0.9, 0.09, 0.1], rtol=1e-5)


def test_search_unreadable_action_changes_nothing():
    steps = [TextStep("q", "?", ""), TextStep("", "search", "r"), TextStep("r", "answer", "", terminal=True)]
    fixed, published = search_keys(steps), search_keys(steps, reference_compatible=True)
    assert fixed.after[0] == fixed.before[0]
    assert published.after[0] == published.after[2] != published.before[0]


# What the other options do.


def test_first_seen_reward_depends_on_order_and_the_largest_does_not():
    cheap, dear = Path([0, 1, 2], [0.0, 5.0]), Path([0, 2, 3], [1.0, 0.0])
    longer = Path([8] * 5, [0.0] * 4, terminal=False, group=1)
    one, other = (paths_table([*order, longer]) for order in ((cheap, dear), (dear, cheap)))
    assert old(one)[0][0] != old(other)[0][2]
    first, second = (
        credits(table, sources="any", source_reward="reward", terminal_key="shared") for table in (one, other)
    )
    assert first[0][0] == second[0][2] == pytest.approx(4.5)


def test_costs_on_edges_prefer_the_short_way():
    """With rewards on nodes as published, a loop is worth more than a dead end; with costs on edges it is not."""
    looped, short = Path([0, 1, 0, 2], [-0.1, -0.1, 10.0]), Path([0, 2], [10.0])
    table = paths_table([looped, short])
    before, _, credit = credits(
        table, node_reward="edge", source_reward="reward", sources="any", negative_rewards="as_is"
    )
    assert before[0] == pytest.approx(10.0)
    assert credit[3] == pytest.approx(0.0)  # the best move loses nothing
    assert credit[0] < 0  # walking off loses
    values = optimal_values(graph((0, 1), (1, 0), (0, 2), nodes=3), jnp.array([-0.1, -0.1, 10.0]), gamma=0.9)
    np.testing.assert_allclose(values, [10.0, 8.9, 0.0], rtol=1e-6)


def test_bidirectional_edges_reach_states_behind_the_start():
    win, lost = Path([0, 1], [10.0]), Path([0, 2, 3], [0, 0], terminal=False)
    table = paths_table([win, lost])
    np.testing.assert_allclose(credits(table)[0], [9, 9, 0], rtol=1e-6)
    np.testing.assert_allclose(credits(table, edge_direction="bidirectional")[0], [9, 9, 8.1], rtol=1e-6)


def test_pagerank_sums_to_one_in_each_graph_and_prefers_the_neighbourhood_of_success():
    win, lost = Path([0, 1, 2], [0, 10.0]), Path([0, 3, 4, 5], [0, 0, 0], terminal=False)
    other = Path([0, 1, 2], [0, 0], terminal=False, group=1)
    table = paths_table([win, lost, other])
    found = state_values(table, propagation="pagerank", edge_direction="bidirectional", damping=0.5)
    present = np.asarray(found.graph.present())
    assert np.asarray(found.values)[present].sum() == pytest.approx(2.0, abs=1e-4)
    before = np.asarray(found.before)
    assert before[1] > before[0] > before[3] > before[4]


def test_pagerank_solves_its_equation():
    """rank = d (P' rank + dangling p) + (1 - d) p, solved as a linear system."""
    edges = [(0, 1), (1, 2), (1, 3), (3, 0), (2, 4)]
    base, damping = np.array([0, 0, 0, 0, 3.0]), 0.7
    found = pagerank_values(
        graph(*edges, nodes=5), jnp.array(base), jnp.zeros(5, int), damping=damping, bidirectional=False,
        max_sweeps=500, tolerance=1e-9,
    )  # fmt: skip
    transition = np.zeros((5, 5))
    for source, target in edges:
        transition[source, target] = 1 / sum(edge[0] == source for edge in edges)
    preference = base / base.sum()
    transition[4] = preference  # dangling
    expected = np.linalg.solve(np.eye(5) - damping * transition.T, (1 - damping) * preference)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_only_visit_is_compared_with_the_group():
    table = paths_table([Path([0, 1, 2], [0, 1.0]), Path([0, 3, 4], [0, 0], terminal=False)])
    itself = rewardflow(table, singleton_baseline="self", step_norm="mean", episode_norm="mean")
    group = rewardflow(table, singleton_baseline="group", step_norm="mean", episode_norm="mean")
    np.testing.assert_allclose(itself[1], 0.5, atol=1e-6)  # the episode part alone
    assert group[1] > itself[1]


def test_invalid_reply_costs_its_own_turn():
    paths = [Path([0, 0, 1], [0, 1.0], valid=[False, True]), Path([0, 2, 3], [0, 0], terminal=False)]
    table = paths_table(paths)
    options = {"step_norm": "mean", "episode_norm": "mean", "singleton_baseline": "group"}
    free, fined = rewardflow(table, **options), rewardflow(table, invalid_penalty=1.0, **options)
    change = np.asarray(fined - free)[:4]
    assert change[0] < 0
    assert (change[1:] >= 0).all()


def test_lone_group_as_published_keeps_its_score():
    table = paths_table([Path([0, 1], [3.0])])
    assert float(estimate(table, "rewardflow", **reference_compatible())[0]) == pytest.approx(3.0)
    assert float(estimate(table, "rewardflow")[0]) == 0.0


def test_a_cycle_without_exit_is_worth_nothing():
    table = paths_table([Path([0, 1, 0], [-0.1, -0.1], terminal=False), Path([0, 2], [10.0])])
    lost = paths_table([Path([0, 1, 0], [-0.1, -0.1], terminal=False)])
    options: dict[str, Any] = {"node_reward": "edge", "source_reward": "reward", "sources": "any"}
    np.testing.assert_allclose(credits(table, **options)[0], [10.0, 8.9, 10.0], rtol=1e-6)
    np.testing.assert_array_equal(credits(lost, **options)[0], [0.0, 0.0])
