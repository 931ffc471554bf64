"""The search world: options, tasks, texts, expert and environment."""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from flowjax.envs import (
    History,
    Message,
    NotReady,
    Observation,
    Past,
    Split,
    Step,
    Style,
    World,
    WorldError,
    check_split,
    user_says,
)
from flowjax.envs.search.corpus import (
    CORPUS,
    HOW_TO_GET,
    MAX_HOPS,
    MIN_DOCUMENTS,
    Document,
    Encyclopedia,
    Question,
    Questions,
    encyclopedia,
    read_questions,
    syllables_for,
)
from flowjax.envs.search.index import Retriever, local
from flowjax.envs.search.protocol import (
    ACCESS,
    CLOSING,
    MAX_ANSWER_CHARACTERS,
    NOTICE,
    OPENING,
    UNREADABLE,
    ProtocolName,
    RemoteRetriever,
    SearchView,
    Wire,
    action_of,
    compact_question,
    compact_result,
    compact_vocabulary,
    information,
    parse_compact,
    parse_tags,
    protocol_of,
    read_action,
    shown,
    templates,
    write_compact,
)
from flowjax.fields import Interval
from flowjax.grading.answers import augmented_f1, exact_match, f1_score, normalise_answer
from flowjax.records import Task, state_key

if TYPE_CHECKING:
    import grain

LOCAL = "local"
_served = itertools.count()  # environments of this process that ask servers
_CAPITALISED = re.compile(r"\b[A-Z]\w+")
_FRAME = frozenset({"What", "The"})  # capitalised, and no names

_RULES: dict[ProtocolName, str] = {
    "rewardflow": """Answer the question below. You can look things up with a search engine before you answer.""",
    "asearcher": """You work on a question together with a search engine. You may search as often as you need. Each
time you are shown what was found, between <information> and </information>.""",
}
_INSTRUCTION: dict[ProtocolName, str] = {
    "rewardflow": """First think about what you know and what is missing, inside <think> </think>. Then do exactly
one of two things. To look something up, write a query inside <search> </search>.
When you know the answer, write it inside <answer> </answer>: only the answer itself, for example
<answer>Lake Como</answer>.""",
    "asearcher": """In each turn, think inside <think> </think>, then do exactly one thing.
To search, write a query inside <search> </search>.{access}
To finish, write the bare answer inside <answer> </answer>, for example <answer>Lake Como</answer>.""",
}
_ACCESS = "\nTo read a page, write its address inside <access> </access>."
_NO_ACTION = "(no action could be read)"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of the search world."""

    path: str = ""  # folder with corpus.jsonl and the two question files; "" for the generated encyclopedia
    documents: int = 1000  # generated
    corpus_seed: int = 0  # fixes the generated documents, whatever the data seed is
    hops: Sequence[int] | int = 2  # documents a generated question takes, or several such numbers
    retriever: Sequence[str] | str = LOCAL  # local, or addresses of servers (several: a list, or with commas)
    wire: Wire | Literal[""] = ""  # request format of the servers; "" is that of the protocol's own system
    topk: int = 3  # documents shown after a search
    document_characters: int = 5000  # longest text shown of one
    search_timeout_s: float = 8.0  # of one search, all attempts together; keep it under config.env.step_timeout_s
    protocol: ProtocolName = "rewardflow"
    access: bool = False  # asearcher: pages can be opened by their address
    score: Literal["em", "f1"] = "em"  # reward of an answer; success is exact match in either case
    # Of generated questions, share that the expert answers by what the first document names, as if that were the end.
    early_share: Annotated[float, Interval(at_least=0, at_most=1)] = 0.0

    def __post_init__(self):
        for name, least, most in (("topk", 1, 100), ("document_characters", 1, 1 << 20), ("corpus_seed", 0, 1 << 63)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise WorldError(f"env.options {name}={value!r}: give a whole number from {least} to {most}")
        if not isinstance(self.documents, int) or self.documents < MIN_DOCUMENTS:
            raise WorldError(f"env.options documents={self.documents!r}: questions need at least {MIN_DOCUMENTS}")
        syllables_for(self.documents)
        if not self.hop_counts or not set(self.hop_counts) <= set(range(1, MAX_HOPS + 1)):
            raise WorldError(f"env.options hops={self.hops!r}: give numbers from 1 to {MAX_HOPS}")
        if not self.search_timeout_s > 0:
            raise WorldError(f"env.options search_timeout_s={self.search_timeout_s}: give a time above 0")
        if not self.retriever:
            raise WorldError(f"env.options retriever={self.retriever!r}: give local, or the address of a server")
        if self.access and self.protocol != "asearcher":
            raise WorldError("env.options access=True needs protocol=asearcher: RewardFlow's protocol opens no pages")

    @property
    def hop_counts(self) -> tuple[int, ...]:
        return (self.hops,) if isinstance(self.hops, int) else tuple(dict.fromkeys(self.hops))

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the retrieval servers; () for an index in this process."""
        given = self.retriever.split(",") if isinstance(self.retriever, str) else self.retriever
        urls = tuple(url.strip() for url in given)
        return () if urls == (LOCAL,) else urls

    def open_retriever(self) -> Retriever:
        if not self.servers:
            return local(self.path, self.documents, self.corpus_seed)
        return self.remote()

    def remote(self) -> RemoteRetriever:
        wire: Wire = self.wire or ("queries" if self.protocol == "asearcher" else "query")
        choose = f"{os.getpid()} {next(_served)}"
        return RemoteRetriever(self.servers, wire=wire, timeout_s=self.search_timeout_s, choose=choose)


class Search(World):
    """Answer a question with a search engine's help. State: the question and the documents retrieved so far."""

    OUTCOMES = ("success", "f1", "answered", "searches")
    COUNTS = ("searches",)
    Options = SearchOptions
    View = SearchView

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.STEPS_WAIT = bool(self.options.servers)

    def env(self) -> "SearchEnv":
        return SearchEnv(self.options, self.options.open_retriever())

    def obstacles(self) -> Iterator[str]:
        """Retrieval servers that give no passages, or none of the generated encyclopedia."""
        if not self.options.servers:
            return
        documents, seed = self.options.documents, self.options.corpus_seed
        book = None if self.options.path else encyclopedia(documents, seed)
        wanted = book.names[0] if book else "anything"
        for url, found in self.options.remote().ask_each(wanted, self.options.topk):
            if isinstance(found, str):
                yield f"env.options retriever: {url} gives no passages ({found}): start one there, or name another"
            elif book and not any(_is_of(book, passage) for passage in found):  # a dense index may rank others first
                served = f"--documents={documents} --corpus_seed={seed}"
                yield (
                    f"env.options retriever: {url} does not find {wanted!r}, or any document of documents={documents} "
                    f"and corpus_seed={seed}: start it with {served}, or set env.options as it was started"
                )

    def longest_step_s(self) -> float:
        return self.options.search_timeout_s if self.options.servers else 0.0

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
            return grain.MapDataset.source(_QuestionTasks(questions, None, name))
        if not options.servers and not (Path(options.path) / CORPUS).is_file():
            raise NotReady(f"env.options path={options.path!r} holds no {CORPUS}: {HOW_TO_GET}, or name a retriever")
        questions = read_questions(options.path, split)
        order = np.random.default_rng([data_seed, split == "held_out"]).permutation(len(questions))
        return grain.MapDataset.source(_QuestionTasks(questions, order, f"search-{split}"))

    def instruct(self, observation: Observation, history: History) -> str:
        """The question, the past turns and what each found, and the latest result."""
        shown: SearchView = observation.view
        steps, latest = _steps(shown, history)
        name = protocol_of(observation.legal_actions)
        parts = [_RULES[name], f"Question: {shown.question}"]
        if latest and latest.found is not None:
            parts.append("The latest search:\n" + _result(SearchView(shown.question, shown.found), name))
        if steps:
            parts.append(f"Steps taken so far: {history[-1].turn}. The latest:")
            parts += [_step(past, result, name) for past, result in steps]
        elif shown.unreadable:
            parts.append(NOTICE)
        access = _ACCESS if ACCESS in observation.legal_actions else ""
        return "\n\n".join([*parts, _INSTRUCTION[name].format(access=access)])

    def compact(self, observation: Observation, history: History) -> str:
        """The question's words, the past turns', the latest result's."""
        shown: SearchView = observation.view
        steps, latest = _steps(shown, history)
        parts = [compact_question(shown), *([compact_result(latest)] if latest else [])]
        for past, result in steps:
            parts += [[write_compact(past.action)] if past.action else [], _compact_news(result)]
        parts.append([] if steps else _notice(shown))
        return " ".join(word for part in parts for word in part)

    def follow_up(self, observation: Observation, style: Style) -> list[Message]:
        """Documents that the last action found; only a notice where it was none, since the conversation holds the
        rest."""
        shown = _news(observation.view)
        if style == "compact":
            return user_says(" ".join(_compact_news(shown)))
        return user_says(_result(shown, protocol_of(observation.legal_actions)))

    def reply(self, action: str, style: Style, legal: tuple[str, ...] = ()) -> str:
        return write_compact(action) if style == "compact" else _tagged(action)

    def parse_action(self, reply: str, legal: tuple[str, ...]) -> str | None:
        """The action inside the reply's only pair of tags, or of a compact reply; one with two actions is
        unreadable."""
        return parse_compact(reply, legal) or parse_tags(reply, legal)

    def answer(self, action: str, after: Observation) -> str:
        """The words of an answer, as exact match compares them."""
        verb, argument = read_action(action, ("answer[<text>]",)) or ("", "")
        return normalise_answer(argument) if verb == "answer" else ""

    def vocabulary(self) -> tuple[str, ...]:
        """Words of compact prompts and replies; the same for an encyclopedia of any size."""
        return compact_vocabulary()

    def expert(self, env: "SearchEnv") -> str:
        """Search for each document that leads to the answer, by its name, then answer.

        It uses the latest result alone, and begins again with the first document where that result has none of the
        chain: an agent that sees only the question and the latest result can imitate it. Where a question comes without
        its chain of documents, it searches for the question itself and gives the gold answer. It answers some questions
        too early (`early_share`).
        """
        question = env.question
        way = question.chain[:-1] or (question.text,)
        # Articles and marks tell titles apart ("C" and "C++"), so names are not compared as answers are.
        there = {tuple(name.casefold().split()) for name in (env.latest if question.chain else env.queries[-1:])}
        reached = max((at for at, name in enumerate(way) if tuple(name.casefold().split()) in there), default=-1)
        if reached + 1 < len(way):
            early = state_key("early", question.text) % 1000 < 1000 * self.options.early_share
            return action_of("answer" if early and reached >= 0 else "search", way[reached + 1])
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


def _steps(shown: SearchView, history: History) -> tuple[list[tuple[Past, SearchView]], SearchView | None]:
    """The past turns with what each found; and the latest result, where no turn shows it."""
    after = [past.view for past in history[1:]] + [shown] if history else []
    steps = [(past, _news(result)) for past, result in zip(history, after, strict=True)]
    return steps, None if any(past.action for past, _ in steps) else shown


def _tagged(action: str) -> str:
    verb, _, argument = action.removesuffix("]").partition("[")
    return f"<{verb}>{argument}</{verb}>"


def _news(view: SearchView) -> SearchView:
    """The result of a turn: only the notice where its reply named no action."""
    return SearchView(view.question, None, True) if view.unreadable else view


def _notice(view: SearchView) -> list[str]:
    return [UNREADABLE] if view.unreadable else []


def _compact_news(view: SearchView) -> list[str]:
    return [*compact_result(view), *_notice(view)]


def _step(past: Past, after: SearchView, name: ProtocolName) -> str:
    said = _tagged(past.action) if past.action else _NO_ACTION
    return f"Step {past.turn}: {said}\n{_result(after, name)}".rstrip()


def _result(view: SearchView, name: ProtocolName) -> str:
    found = [] if view.found is None else [f"{OPENING}\n{information(view.found, name)}\n{CLOSING}"]
    return "\n".join([*found, NOTICE] if view.unreadable else found)


def _is_of(book: Encyclopedia, passage: Document) -> bool:
    names = book.names
    return passage.title in names and book.document(names.index(passage.title)).contents == passage.contents


class _QuestionTasks:
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
        hops = len(question.chain) - 1
        kind = f"{hops} hop{'s' * (hops > 1)}" if question.chain else ""
        return Task(identity, "search", index, {name: _plain(value) for name, value in payload.items()}, kind=kind)


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
        """Titles of the documents that the latest search found."""
        return self._latest

    @property
    def queries(self) -> tuple[str, ...]:
        return tuple(self._queries)

    def reset(self, task: Task, seed: int) -> Observation:
        payload = task.payload
        names = ("answers", "chain", "augmented")
        text = " ".join(payload["question"].split())
        self._question = Question(text, *(tuple(payload.get(name, ())) for name in names))
        self._known: dict[str, str] = {}  # id and contents, as ids may be given twice -> title
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
        self._latest = frozenset(passage.title for passage in found)
        self._known.update((f"{passage.id}\n{passage.contents}", passage.title) for passage in found)
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
