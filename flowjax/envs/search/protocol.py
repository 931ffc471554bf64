"""Actions of the search world: as tags of the two published protocols, and in few words for nano models. Then requests
to retrieval servers, their answers, and the retriever that sends the requests.

An action is `search[<words>]`, `answer[<text>]` or, in ASearcher's protocol with page access, `access[<url>]`. The
templates among the legal actions tell which protocol is in use.

Compact words are a small fixed vocabulary: names of the generated encyclopedia are cut into their syllables, relations
stay, everything else is left out. Of an encyclopedia of any size, a word is one of 48 syllables, 15 relations or a few
marks, and a name never seen before can still be read and copied.
"""

import http.client
import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from flowjax.envs import EnvDied, WorldError
from flowjax.envs.search.corpus import RELATIONS, SYLLABLES, Document, document, split_name
from flowjax.grading.answers import without_thoughts
from flowjax.records import state_key

ProtocolName = Literal["rewardflow", "asearcher"]

MAX_QUERY_CHARACTERS = 1000
MAX_ANSWER_CHARACTERS = 1000  # anything longer is no short answer, and ends the episode as malformed
NOTICE, NOTHING = "The last reply held no legal action.", "Nothing was found."
OPENING, CLOSING = "<information>", "</information>"

ANSWER = "answer[<text>]"
TEMPLATES: dict[ProtocolName, tuple[str, ...]] = {
    "rewardflow": ("search[<words>]", ANSWER),
    "asearcher": ("search[<query>]", ANSWER),
}
ACCESS = "access[<url>]"

_TAG = re.compile(r"<(/?)(search|answer|access)>", re.IGNORECASE)
_SHOWN_TAGS = re.compile(r"</?(?:information|search|answer|access|think)>", re.IGNORECASE)
_ACTION = re.compile(r"(search|answer|access)\[(.*)\]", re.DOTALL)

ASKED, FOUND, EMPTY, UNREADABLE = "?", "found", "nothing", "none"
VERBS = ("search", "answer")
_LEGAL = tuple(f"{verb}[<words>]" for verb in VERBS)
_NAME_OR_RELATION = re.compile(r"[A-Za-z]+")
_SYLLABLES, _RELATIONS = frozenset(SYLLABLES), frozenset(RELATIONS)


@dataclass(frozen=True, slots=True)
class SearchView:
    """The question, what the latest action found, as (address, contents) of each document, and whether the last reply
    held no legal action. `found` is None before the first search."""

    question: str
    found: tuple[tuple[str, str], ...] | None = None
    unreadable: bool = False


def templates(protocol: ProtocolName, access: bool) -> tuple[str, ...]:
    """The legal actions, with `access` those that open pages too."""
    return (*TEMPLATES[protocol], ACCESS) if access else TEMPLATES[protocol]


def protocol_of(legal: Sequence[str]) -> ProtocolName:
    """The protocol to which legal actions belong."""
    return "asearcher" if TEMPLATES["asearcher"][0] in legal else "rewardflow"


def action_of(verb: str, argument: str) -> str:
    """An action of one line, whatever white space its argument has; `read_action` takes it apart."""
    return f"{verb}[{' '.join(argument.split())}]"


def read_action(action: str, legal: Sequence[str]) -> tuple[str, str] | None:
    """Verb and argument, None where the action fits none of the templates. Only answers may be empty."""
    match = _ACTION.fullmatch(action)
    if match is None or not any(template.startswith(f"{match[1]}[") for template in legal):
        return None
    verb, argument = match[1], match[2].strip()
    if verb != "answer" and not 0 < len(argument) <= MAX_QUERY_CHARACTERS:
        return None
    return verb, argument


def parse_tags(reply: str, legal: Sequence[str]) -> str | None:
    """The action of a reply that has, after its reasoning, exactly one pair of tags, of a legal verb. Tags inside the
    reasoning do not count: it may discuss them."""
    verbs = {template.split("[")[0] for template in legal}
    reply = without_thoughts(reply)
    tags = [(match[1], match[2].lower(), match) for match in _TAG.finditer(reply) if match[2].lower() in verbs]
    if [tag[0] for tag in tags] != ["", "/"] or tags[0][1] != tags[1][1]:
        return None
    action = action_of(tags[0][1], reply[tags[0][2].end() : tags[1][2].start()])
    return action if read_action(action, legal) else None


def parse_as_published(reply: str, legal: Sequence[str]) -> str | None:
    """The action that the published systems execute, whatever else the reply holds.

    RewardFlow: the text up to the first `</search>`, else the first `</answer>`; in it the first search, else the first
    answer. It calls a reply with both, or with two of one, invalid, and executes it all the same. ASearcher: the first
    search, else the first access, else the first answer.
    """
    verbs = ["search", "access", "answer"] if protocol_of(legal) == "asearcher" else ["search", "answer"]
    if protocol_of(legal) == "rewardflow":
        for end in ("</search>", "</answer>"):  # case-sensitive, unlike the extraction
            if end in reply:
                reply = reply[: reply.index(end) + len(end)]
                break
    for verb in verbs:
        # One pattern for the pair would look for its end behind every `<search>` again: quadratic time.
        opening = re.search(f"<{verb}>", reply, re.IGNORECASE)
        closing = opening and re.compile(f"</{verb}>", re.IGNORECASE).search(reply, opening.end())
        if opening and closing:
            action = action_of(verb, reply[opening.end() : closing.start()])
            return action if read_action(action, legal) else None
    return None


def shown(documents: Sequence[Document], limit_characters: int) -> tuple[tuple[str, str], ...]:
    """Address and contents of each document as an agent may see them, with a space for each tag inside."""
    # A space, since the text on both sides of a tag could join to another tag: `<sea<search>rch>`.
    return tuple(
        (_SHOWN_TAGS.sub(" ", one.url), _SHOWN_TAGS.sub(" ", one.contents)[:limit_characters]) for one in documents
    )


def information(found: Sequence[tuple[str, str]], protocol: ProtocolName) -> str:
    """Documents of a search, without the tags around them."""
    if not found:
        return NOTHING
    return "\n".join(
        f"[Doc {number}]({url}):\n{contents}" if protocol == "asearcher" else f"Doc {number}: {contents}"
        for number, (url, contents) in enumerate(found, 1)
    )


def compact_vocabulary() -> tuple[str, ...]:
    return (*VERBS, ASKED, FOUND, EMPTY, UNREADABLE, *RELATIONS, *SYLLABLES)


def compact_words(text: str) -> list[str]:
    """The text's relations, and its names by their syllables; a name right after itself is given once."""
    found: list[str] = []
    last = ""
    for word in _NAME_OR_RELATION.findall(text):
        if word in _RELATIONS:
            found.append(word)
            last = word
        elif word != last and (name := split_name(word)):
            found += name
            last = word
    return found


def compact_question(view: SearchView) -> list[str]:
    return [*compact_words(view.question), ASKED]


def compact_result(view: SearchView) -> list[str]:
    """Documents of the latest search: after `found` each document's words, or `nothing`."""
    if view.found is None:
        return []
    return [word for _, contents in view.found for word in (FOUND, *compact_words(contents))] or [EMPTY]


def write_compact(action: str) -> str:
    """An action as a compact reply, for example `search rem bok`."""
    read = read_action(action, _LEGAL)
    return " ".join([read[0], *compact_words(read[1])]) if read else UNREADABLE


def parse_compact(reply: str, legal: Sequence[str]) -> str | None:
    """The action of a reply that consists of a verb, syllables and relations; syllables in a row are one name."""
    verb, *rest = reply.split() or [""]
    if verb not in VERBS or not _SYLLABLES.union(_RELATIONS).issuperset(rest):
        return None
    spelled, name = [], ""
    for word in (*rest, ""):  # the empty word ends a name that comes last
        if word in _SYLLABLES:
            name += word
            continue
        spelled += [name.capitalize(), word]
        name = ""
    action = action_of(verb, " ".join(spelled))
    return action if read_action(action, legal) else None


# ---------------------------------------------------------------------------------------------------- retrieval servers

Wire = Literal["query", "queries", "search"]  # the three request formats, see server.py
KEY_VARIABLE = "FLOWJAX_SEARCH_KEY"  # environment variable with the X-API-Key of servers that want one
FIRST_PAUSE_S = 0.1  # between rounds of all servers, doubled each time
BUSY_PAUSE_S = 1.0  # what a busy server of ours asks for
Found = TypeVar("Found")


class RetrievalError(EnvDied):
    """No server gives passages. It ends the episode."""

    def __init__(self, message: str):
        super().__init__(message, "env_error")


def search_request(wire: Wire, query: str, count: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for the `count` best passages."""
    if wire == "search":
        return "/search", {"query": query, "n_docs": count, "backend": "faiss", "nprobe": 128, "min_words": 0}
    asked = {"query": query} if wire == "query" else {"queries": [query]}
    return "/retrieve", {**asked, "topk": count, "return_scores": True}


def read_found(wire: Wire, answer: Any) -> list[Document]:
    """The passages of an answer. For one of another form, whichever error reading it raises; `_ask` catches it."""
    if wire != "search":  # with scores around them or without
        return [_passage(item.get("document", item)) for item in answer["result"][0]]
    found = (answer["results"]["passages"] or [[]])[0]  # a list for each query; some give none where nothing is found
    named = [("id", "passage_id"), ("contents", "text"), ("url", "filename")]
    return [_passage({ours: fields[theirs] for ours, theirs in named if theirs in fields}) for fields in found]


def read_page(url: str, answer: Any) -> Document | None:
    """The page of an answer, None where there is none. Errors as `read_found`."""
    page = answer["result"][0]
    if page is None:
        return None
    return document({"url": url, "id": url, **{name: value for name, value in page.items() if value is not None}}, -1)


def _passage(fields: Mapping[str, Any]) -> Document:
    """A passage; where the server gives no id, a hash of the contents is its id."""
    found = document(fields, -1)
    return found if fields.get("id") is not None else replace(found, id=f"{state_key(found.contents):016x}")


class RemoteRetriever:
    """Asks one of several retrieval servers, and the next one after a failure.

    A request is tried until `timeout_s` has passed since its first try; then `RetrievalError` is raised. It is raised
    at once if every server has refused the request, or given an answer that cannot be read.
    """

    def __init__(self, urls: Sequence[str], *, wire: Wire, timeout_s: float, choose: str = ""):
        self._servers = [_address(url) for url in urls]
        self._wire: Wire = wire
        self._timeout_s = timeout_s
        self._turn = state_key(choose) % len(urls)
        self._connections: dict[tuple[str, int], http.client.HTTPConnection] = {}

    def search(self, query: str, count: int) -> list[Document]:
        return self._post(*search_request(self._wire, query, count), partial(read_found, self._wire))[:count]

    def ask_each(self, query: str, count: int) -> Iterator[tuple[str, list[Document] | str]]:
        """Search each server, a busy one twice: its address, with its passages or the reason why there are none."""
        path, body = search_request(self._wire, query, count)
        for server in dict.fromkeys(self._servers):
            ask = partial(self._ask, server, path, body, partial(read_found, self._wire), self._timeout_s)
            try:
                try:
                    found = ask()
                except http.client.HTTPException:
                    time.sleep(BUSY_PAUSE_S)
                    found = ask()
                yield _url(server), found
            except (RetrievalError, OSError, http.client.HTTPException) as error:
                yield _url(server), f"{type(error).__name__}: {error}"

    def access(self, url: str) -> Document | None:
        return self._post("/access", {"urls": [url]}, partial(read_page, url))

    def _post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Found]) -> Found:
        until = time.monotonic() + self._timeout_s
        count, pause_s = len(self._servers), FIRST_PAUSE_S
        problem, refused = "no attempt was made", set[tuple[str, int]]()
        for attempt in itertools.count():
            if (left_s := until - time.monotonic()) <= 0:
                break
            server = self._servers[self._turn % count]
            try:
                # A silent server takes half of the time that is left; the rest is for those that follow in this round.
                # An equal share for each would be too short for slow servers, where there are many.
                return self._ask(server, path, body, read, left_s / min(2, count - attempt % count))
            except RetrievalError as error:
                problem = str(error)
                refused.add(server)
                if refused.issuperset(self._servers):
                    raise
            except (OSError, http.client.HTTPException) as error:
                problem = f"{_url(server)}: {type(error).__name__}: {error}"
            self._turn += 1
            if attempt % count == count - 1:  # another server may be asked at once
                time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
                pause_s *= 2
        raise RetrievalError(f"no retrieval server answered within {self._timeout_s:g} s; the last problem: {problem}")

    def _ask(
        self,
        server: tuple[str, int],
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Found],
        timeout_s: float,
    ) -> Found:
        """The answer of one server.

        Raises:
            RetrievalError: it refuses the request, or answers what cannot be read.
            OSError, HTTPException: it cannot be reached, or fails.
        """
        status, answer = self._exchange(server, path, body, timeout_s)
        if status == 200:
            try:
                return read(json.loads(answer))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                why = f"{type(error).__name__}: {error}"
                raise RetrievalError(f"{_url(server)}{path} answered {answer[:200]!r} ({why})") from error
        problem = f"status {status}: {answer[:200].decode(errors='replace')}"
        if status < 500 and status != 429:
            raise RetrievalError(f"{_url(server)}{path} refuses the request: {problem}")
        raise http.client.HTTPException(problem)

    def _exchange(
        self, server: tuple[str, int], path: str, body: Mapping[str, Any], timeout_s: float
    ) -> tuple[int, bytes]:
        until, answer = time.monotonic() + timeout_s, bytearray()
        connection: Any = self._connections.pop(server, None) or http.client.HTTPConnection(*server)
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Content-Type": "application/json", **({"X-API-Key": key} if key else {})}
        try:
            if connection.sock is None:
                connection.timeout = timeout_s
                _connect(connection, timeout_s)
                connection.sock = _InTime(fileno=connection.sock.detach())  # pyright: ignore[reportAttributeAccessIssue]
            connection.sock.until = until
            connection.sock.settimeout(timeout_s)  # of sending
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            while piece := response.read1():
                answer += piece
            if response.length:
                raise http.client.IncompleteRead(bytes(answer), response.length)
            response.close()
        except BaseException:
            connection.close()
            raise
        self._connections[server] = connection  # kept alive for the next search
        return response.status, bytes(answer)


def _connect(connection: http.client.HTTPConnection, timeout_s: float) -> None:
    """Connect within the time. In a thread, since looking up the host's name has no time-out of its own."""
    ended = Future[None]()

    def connect() -> None:
        try:
            connection.connect()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=connect, daemon=True).start()
    try:
        ended.result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(str(error) or "no connection in time, or no look-up of its name") from error


class _InTime(socket.socket):
    """A socket with one deadline for a whole answer: a time-out bounds one read, and an answer takes many."""

    until = 0.0

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        if (left_s := self.until - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left_s)
        return super().recv_into(buffer, nbytes, flags)


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        parts, port = None, 80
    if parts is None or parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise WorldError(
            f"env.options retriever={url!r}: give local alone, or addresses of servers without a path, for example "
            "http://127.0.0.1:8000"
        )
    return parts.hostname, port


def _url(server: tuple[str, int]) -> str:
    return f"http://{server[0]}:{server[1]}"
