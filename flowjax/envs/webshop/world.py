"""The shop as a world. State: page, query, results page, product, sub page, chosen options, and the goal."""

import functools
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flowjax.envs.base import History, Message, Observation, Split, Step, Style, World, WorldError, check_split
from flowjax.envs.webshop import prompts
from flowjax.envs.webshop.experts import best_action
from flowjax.envs.webshop.goals import split_goals
from flowjax.envs.webshop.options import WebShopOptions
from flowjax.envs.webshop.pages import SEARCH_TEMPLATE, SEPARATOR, Pages, State, done_text
from flowjax.envs.webshop.reward import Goal, check_requirements, noun_finder, score
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

SUCCESS_REWARD = 10.0
MAX_RANDOM_WORDS = 3


class WebShop(World):
    """Buy the product that an instruction describes (Yao et al. 2022, arXiv 2207.01206)."""

    OUTCOMES = ("success", "score")
    Options = WebShopOptions

    def env(self) -> "WebShopEnv":
        return WebShopEnv(self.options)

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """The goals of a split, in the order of their shuffle. As many as the catalog has; see `len`."""
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        own: WebShopOptions = self.options
        both = split_goals(own.path or None, own.products, own.seed, own.goals, data_seed, own.held_out, own.split_by)
        if not both[split]:
            raise WorldError(f"env.options products={own.products} leaves no {split} goals: raise it")
        name = f"{own.goals}-{split}-{data_seed}"
        return grain.MapDataset.range(len(both[split])).map(functools.partial(_task, both[split], name))

    def prompt(self, observation: Observation, history: History, style: Style) -> list[Message]:
        return prompts.prompt(observation, history, style)

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        return prompts.follow_up(observation, style)

    def reply(self, action: str, style: Style) -> str:
        return prompts.reply(action, style)

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        return prompts.parse_action(reply, legal)

    def vocabulary(self) -> tuple[str, ...]:
        return prompts.vocabulary(self.options.catalog())

    def expert(self, env: "WebShopEnv") -> str:
        """From the goal's own product, its page in the results, and the chosen options."""
        return best_action(env.catalog, env.goal, env.state)

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """Any legal action; a search is for one to three words of the instruction."""
        if not observation.legal_actions:
            return ""
        action = observation.legal_actions[rng.integers(len(observation.legal_actions))]
        if action != SEARCH_TEMPLATE:
            return action
        instruction = observation.text.partition("Instruction:" + SEPARATOR)[2].split(SEPARATOR)[0]
        known = prompts.words(instruction.split(", and price lower than ")[0]) or ["gift"]
        count = min(len(known), int(rng.integers(1, MAX_RANDOM_WORDS + 1)))
        return f"search[{' '.join(cast(str, word) for word in rng.choice(known, count, replace=False))}]"


def _task(goals: tuple[Goal, ...], name: str, index: int) -> Task:
    """The index-th goal of a split."""
    return Task(f"webshop-{name}-{index}", "webshop", index, {"goal": asdict(goals[index])})


class WebShopEnv:
    """One purchase at a time. `nouns_by` names what finds the nouns of titles (see docs/worlds/webshop.md)."""

    def __init__(self, options: WebShopOptions):
        check_requirements()
        self.catalog = options.catalog()
        self.nouns_by = noun_finder()[0]
        self._pages = Pages(self.catalog, options.show_attributes)
        self._goal: Goal | None = None
        self._goal_key = 0
        self.state = State()
        self._score = 0.0

    @property
    def goal(self) -> Goal:
        if self._goal is None:
            raise RuntimeError("the environment has not been reset")
        return self._goal

    def reset(self, task: Task, seed: int) -> Observation:
        """The search page of the task's goal.

        Raises:
            WorldError: the task's product is not in the catalog, which then is not the one its goals were made from.
        """
        told: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list | tuple) else v for name, v in task.payload["goal"].items()
        }
        goal = Goal(**told)
        if goal.asin not in self.catalog.by_asin:
            raise WorldError(
                f"the task's product {goal.asin} is not in the catalog: env.options differ from the task's"
            )
        self._goal, self.state, self._score = goal, State(), 0.0
        self._goal_key = state_key(repr(goal))
        return self._observe()

    def step(self, action: str) -> Step:
        after = self._pages.follow(self.state, action)
        if after is None:
            return Step(self._observe(), 0.0, self.state.page == "done", False, self._outcome())
        self.state = after
        if after.page != "done":
            return Step(self._observe(), 0.0, False, True, self._outcome())
        wanted = self.catalog.products[self.catalog.by_asin[self.goal.asin]]
        self._score = score(self.goal, self.catalog.products[after.product], wanted, dict(after.options))
        return Step(self._observe(), SUCCESS_REWARD * (self._score == 1.0), True, True, self._outcome())

    def _observe(self) -> Observation:
        state = self.state
        if state.page == "done":
            text, legal = done_text(self.catalog.products[state.product], state.options, self._score), ()
        else:
            text, legal = self._pages.show(state, self.goal.instruction)
        return Observation(text, legal, self._key())

    def _key(self) -> int:
        state = self.state
        product = self.catalog.products[state.product].asin if state.product >= 0 else ""
        if state.page == "done":  # how the product was found no longer matters
            state = replace(state, query="", number=1)
        options = [part for pair in state.options for part in pair]
        return state_key(self._goal_key, state.page, state.query, state.number, product, state.sub_page, *options)

    def _outcome(self) -> dict[str, float]:
        return {"success": float(self._score == 1.0), "score": self._score}
