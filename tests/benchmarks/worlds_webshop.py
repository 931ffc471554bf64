"""Steps per second of the WebShop world in one process: python -m tests.benchmarks.worlds_webshop

Actions are chosen beforehand, so that only `reset` and `step` are timed: 200 goals over 1000 products, once with random
legal actions (every search is one that was not asked before in that episode) and once with the expert's. The published
engine renders HTML and parses it back; it does not install beside this project and is not timed here.

Prints, too, what the expert and random actions reach on held-out goals, and what two rules solve that go by what
compact pages show, on the goals of `webshop:nano`.
"""

import math
import time
from typing import cast

import numpy as np

from flowjax.envs.webshop import WebShop
from flowjax.envs.webshop.goals import without_price, words
from flowjax.envs.webshop.pages import BUY, PREVIOUS
from flowjax.envs.webshop.world import PRICE_STEP, WebShopEnv
from flowjax.records import Task

GOALS = 200
MAX_TURNS = 15
TURNS = (12, 15, 20)


def _scripts(env: WebShopEnv, tasks: list[Task], rng: np.random.Generator | None) -> list[tuple[Task, list[str]]]:
    """The actions of one episode of each task: random ones, or the expert's."""
    scripts = []
    for task in tasks:
        observation, actions = env.reset(task, 0), []
        for _ in range(MAX_TURNS):
            actions.append(WebShop().random_action(observation, rng) if rng else WebShop().expert(env))
            step = env.step(actions[-1])
            observation = step.observation
            if step.terminal:
                break
        scripts.append((task, actions))
    return scripts


def _rate(env: WebShopEnv, scripts: list[tuple[Task, list[str]]], seconds: float) -> float:
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for task, actions in scripts:
            env.reset(task, 0)
            for action in actions:
                env.step(action)
            steps += len(actions)
    return steps / (time.perf_counter() - started)


def benchmark_steps(seconds: float) -> dict[str, float]:
    """Environment steps per second, resets included: `first` sees each query for the first time, others come again."""
    source = WebShop().tasks("train", 0)
    tasks = [task for task in (source[index] for index in range(GOALS)) if isinstance(task, Task)]
    env = WebShop().env()
    scripts = {"random": _scripts(env, tasks, np.random.default_rng(0)), "expert": _scripts(env, tasks, None)}
    rates: dict[str, float] = {}
    for name, script in scripts.items():
        fresh = WebShop().env()
        fresh.catalog.search.cache_clear()
        started = time.perf_counter()
        for task, actions in script:
            fresh.reset(task, 0)
            for action in actions:
                fresh.step(action)
        rates[f"{name}, first"] = sum(len(actions) for _, actions in script) / (time.perf_counter() - started)
        rates[name] = _rate(fresh, script, seconds / len(scripts))
    return rates


def rule_success(*, looks: bool, max_turns: int) -> float:
    """Success of a shopper who searches for all that a goal says, opens products in their order, chooses what is wanted
    and buys: the first one, or the first whose options and price fit if it `looks`."""
    world = WebShop(products=500)
    env, source = world.env(), world.tasks("held_out", 0)
    won = 0.0
    for index in range(len(source)):
        task = source[index]
        assert isinstance(task, Task)
        env.reset(task, 0)
        goal, left = env.goal, max_turns - 1
        results = env.step(f"search[{' '.join(words(without_price(goal.instruction)))}]")
        wanted = [f"click[{value}]" for value in goal.options]
        for asin, _ in results.observation.view.products:
            item = env.step(f"click[{asin.lower()}]").observation
            chosen = [action for action in wanted if action in item.legal_actions]
            price = PRICE_STEP * math.ceil(item.view.price / PRICE_STEP)
            if not looks or (chosen == wanted and price <= goal.price_below):
                left -= 1 + len(chosen) + 1
                won += left >= 0 and [env.step(action) for action in (*chosen, f"click[{BUY}]")][-1].outcome["success"]
                break
            left -= 2
            env.step(f"click[{PREVIOUS}]")
    return won / len(source)


def expert_turns(kind: str, goals: int) -> list[int]:
    """Turns that the expert takes to succeed, on the first held-out goals; those without success are left out."""
    world = WebShop(goals=kind)
    env, source = world.env(), world.tasks("held_out", 0)
    found = []
    for index in range(goals):
        env.reset(cast(Task, source[index]), 0)
        steps = []
        while len(steps) < TURNS[-1] and not (steps and steps[-1].terminal):
            steps.append(env.step(world.expert(env)))
        if steps[-1].terminal and steps[-1].outcome["success"]:
            found.append(len(steps))
    return found


def random_outcomes(kind: str, episodes: int) -> tuple[float, float]:
    """Mean score and success of random legal actions, on held-out goals in turn."""
    world, rng = WebShop(goals=kind), np.random.default_rng(0)
    env, source = world.env(), world.tasks("held_out", 0)
    totals = np.zeros(2)
    for episode in range(episodes):
        observation = env.reset(cast(Task, source[episode % len(source)]), episode)
        for _ in range(MAX_TURNS):
            step = env.step(world.random_action(observation, rng))
            observation = step.observation
            if step.terminal:
                totals += step.outcome["score"], step.outcome["success"]
                break
    score, success = totals / episodes
    return score, success


def main() -> None:
    print("| | goals (train, held out) | expert: success in 12, 15, 20 turns | random: score | random: success |")
    print("|---|---|---|---|---|")
    for kind in ("synthetic", "human"):
        sizes = ", ".join(str(len(WebShop(goals=kind).tasks(split, 0))) for split in ("train", "held_out"))
        turns = np.array(expert_turns(kind, 100))
        solved = ", ".join(f"{np.sum(turns <= most) / 100:.2f}" for most in TURNS)
        score, success = random_outcomes(kind, 1000)
        print(f"| `goals={kind}` | {sizes} | {solved} | {score:.3f} | {success:.3f} |")
    for looks in (False, True):
        solved = {turns: rule_success(looks=looks, max_turns=turns) for turns in TURNS}
        text = ", ".join(f"{share:.1%} in {turns} turns" for turns, share in solved.items())
        print(f"webshop, a rule that {'looks at options and price' if looks else 'buys the first product'}: {text}")
    for name, rate in benchmark_steps(2.0).items():
        print(f"webshop, {name:14} {rate:8,.0f} steps/s")


if __name__ == "__main__":
    main()
