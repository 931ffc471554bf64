"""The search world's environment, tasks and expert."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowjax.envs.base import History, Message, NotReady, Observation, Split, Step, Style, World, check_split
from flowjax.envs.search import compact, prompts
from flowjax.envs.search.client import Retriever
from flowjax.envs.search.corpus import Document, Question, Questions, encyclopedia
from flowjax.envs.search.files import CORPUS, HOW_TO_GET, read_questions
from flowjax.envs.search.options import SearchOptions
from flowjax.envs.search.protocol import (
    MAX_ANSWER_CHARACTERS,
    SearchView,
    action_of,
    read_action,
    shown,
    templates,
)
from flowjax.grading.qa import augmented_f1, exact_match, f1_score, normalise_answer
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

_CAPITALISED = re.compile(r"\b[A-Z]\w+")
_FRAME = frozenset({"What", "The"})  # capitalised, and no names


class Search(World):
    """Answer a question with a search engine's help. State: the question and the documents retrieved so far."""

    OUTCOMES = ("success", "f1", "answered", "searches")
    Options = SearchOptions
    View = SearchView

    def env(self) -> "SearchEnv":
        return SearchEnv(self.options, self.options.open_retriever())

    def tasks(self, split: Split, data_seed: int) -> "grain.MapDataset[Task]":
        """Every question of a split once, in an order that the data seed draws.

        Training and held-out questions of the generated encyclopedia are about things that never mention each other.
        From files, training questions that are also test questions are left out.
        """
        import grain  # imports jax, which processes that only hold environments do without

        check_split(split)
        options: SearchOptions = self.options
        if not options.path:
            book = encyclopedia(options.documents, options.corpus_seed)
            questions = Questions(book, split, data_seed, options.hop_counts)
            name = f"search-{options.documents}-{options.corpus_seed}"
            return grain.MapDataset.source(_TaskSource(questions, None, name))
        if not options.servers and not (Path(options.path) / CORPUS).is_file():
            raise NotReady(f"env.options path={options.path!r} holds no {CORPUS}: {HOW_TO_GET}, or name a retriever")
        questions = read_questions(options.path, split)
        order = np.random.default_rng([data_seed, split == "held_out"]).permutation(len(questions))
        return grain.MapDataset.source(_TaskSource(questions, order, f"search-{split}"))

    def instruct(self, observation: Observation, history: History) -> str:
        return prompts.prompt(observation, history, "instruct")

    def compact(self, observation: Observation, history: History) -> str:
        return prompts.prompt(observation, history, "compact")

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        return prompts.follow_up(observation, style)

    def reply(self, action: str, style: Style) -> str:
        return prompts.reply(action, style)

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        return prompts.parse_action(reply, legal)

    def vocabulary(self) -> tuple[str, ...]:
        """Words of compact prompts and replies; the same for an encyclopedia of any size."""
        return compact.vocabulary()

    def expert(self, env: "SearchEnv") -> str:
        """Search for each document that leads to the answer, by its name, then answer.

        It goes by the latest result alone, and starts over where that is beside the way, so that an agent that sees no
        more than the question and the latest result can do the same. Where a question comes without its chain of
        documents, it searches for the question itself and gives the gold answer.
        """
        question = env.question
        way = question.chain[:-1] or (question.text,)
        reached = max((place for place, name in enumerate(way) if name in env.latest), default=-1)
        if reached + 1 < len(way):
            return action_of("search", way[reached + 1])
        return action_of("answer", question.answers[0])

    def random_action(self, observation: Observation, rng: np.random.Generator) -> str:
        """A search or an answer at random, about a name that the observation holds (or a word, where it has none)."""
        template = observation.legal_actions[rng.integers(len(observation.legal_actions))]
        verb = template.split("[")[0]
        view: SearchView = observation.view
        found = view.found or ()
        if verb == "access":
            if found:
                return action_of(verb, found[rng.integers(len(found))][0])
            verb = "search"
        text = "\n".join([view.question, *(contents for _, contents in found)])
        names = [name for name in dict.fromkeys(_CAPITALISED.findall(text)) if name not in _FRAME]
        names = names or re.findall(r"\w+", text) or ["nothing"]
        return action_of(verb, names[rng.integers(len(names))])


class _TaskSource:
    """Questions as tasks, by index."""

    def __init__(self, questions: Sequence[Question], order: np.ndarray | None, name: str):
        self._questions, self._order, self._name = questions, order, name

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Task:
        row = index if self._order is None else int(self._order[index])
        question = self._questions[row]
        identity = f"{self._name}-{state_key(question.text):016x}"
        payload = {"question": question.text, "answers": question.answers, "chain": question.chain}
        if question.augmented:
            payload["augmented"] = question.augmented
        return Task(identity, "search", index, {name: _plain(value) for name, value in payload.items()})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class SearchEnv:
    """A question and what has been found out about it. State: the question and the set of documents retrieved so far,
    or, once an answer is given, whether it was right, wrong or malformed."""

    def __init__(self, options: SearchOptions, retriever: Retriever):
        self._options, self._retriever = options, retriever
        self._legal = templates(options.protocol, options.access)
        self._question: Question | None = None

    @property
    def question(self) -> Question:
        if self._question is None:
            raise RuntimeError("the environment has not been reset")
        return self._question

    @property
    def titles(self) -> frozenset[str]:
        """Titles of the documents retrieved so far."""
        return frozenset(self._known.values())

    @property
    def latest(self) -> frozenset[str]:
        """Titles of the documents that the latest search found, and what it asked for."""
        return self._latest

    @property
    def queries(self) -> tuple[str, ...]:
        return tuple(self._queries)

    def reset(self, task: Task, seed: int) -> Observation:
        payload = task.payload
        names = ("answers", "chain", "augmented")
        text = " ".join(payload["question"].split())
        self._question = Question(text, *(tuple(payload.get(name, ())) for name in names))
        self._known: dict[str, str] = {}  # id -> title
        self._queries: list[str] = []
        self._latest: frozenset[str] = frozenset()
        self._found: tuple[tuple[str, str], ...] | None = None
        self._notice, self._verdict = False, ""
        self._f1 = 0.0
        return self._observe()

    def step(self, action: str) -> Step:
        question, asked = self.question, read_action(action, self._legal)
        if self._verdict:
            return Step(self._observe(), 0.0, True, False, self._outcome())
        self._notice = asked is None
        if asked is None:
            return Step(self._observe(), 0.0, False, False, self._outcome())
        verb, argument = asked
        if verb == "answer":
            reward = self._answer(question, argument)
            return Step(self._observe(), reward, True, True, self._outcome())
        found = self._look_up(verb, argument)
        self._queries.append(argument)
        self._latest = frozenset([argument, *(passage.title for passage in found)])
        self._known.update((passage.id, passage.title) for passage in found)
        self._found = shown(found, self._options.document_characters)
        return Step(self._observe(), 0.0, False, True, self._outcome())

    def _look_up(self, verb: str, argument: str) -> list[Document]:
        if verb == "search":
            return self._retriever.search(argument, self._options.topk)
        page = self._retriever.access(argument)
        return [] if page is None else [page]

    def _answer(self, question: Question, said: str) -> float:
        if not normalise_answer(said) or len(said) > MAX_ANSWER_CHARACTERS:
            self._verdict = "malformed"
            return 0.0
        self._verdict = "right" if exact_match(said, question.answers) else "wrong"
        if self._options.protocol == "asearcher":
            self._f1 = augmented_f1(said, question.answers, question.augmented)
        else:
            self._f1 = f1_score(said, question.answers)
        return self._f1 if self._options.score == "f1" else float(self._verdict == "right")

    def _observe(self) -> Observation:
        view = SearchView(self.question.text, self._found, self._notice)
        return Observation(view, self._legal, self._key())

    def _key(self) -> int:
        """Wrong answers that score differently are different states: a state has one reward."""
        if not self._verdict:
            return state_key("search", self.question.text, *sorted(self._known))
        scored = f"{self._f1:.6f}" if self._options.score == "f1" else ""
        return state_key("search", self.question.text, "answer", self._verdict, scored)

    def _outcome(self) -> dict[str, float]:
        right, answered = float(self._verdict == "right"), float(bool(self._verdict))
        return {"success": right, "f1": self._f1, "answered": answered, "searches": float(len(self._queries))}
