"""Checks before workflows run: the isolation of programs, the operators, and whether each backend answers.

    python -m flowjax.canvas.doctor --config=configs/canvas.py:nano
    python -m flowjax.canvas.doctor --config=backends.json --operators=my_package.operators:Shout

A recipe's `env.options` (or a JSON object) may have `backends`, `extra_operators` and `allow_no_isolation`. A JSON
object with none of these holds the backends themselves. One line each; the exit code is 1 where something fails.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowjax.canvas.backends import Backend, BackendError, BackendUnavailable, Request, reply_of
from flowjax.canvas.backends.config import BackendConfigError, open_backends, read_backends, read_options
from flowjax.canvas.backends.openai import OpenAIBackend
from flowjax.canvas.operators import OperatorError, object_form, object_of, object_schema
from flowjax.canvas.operators.registry import OperatorRegistryError, load_operators
from flowjax.fields import shown, type_problem
from flowjax.grading.sandbox import BUBBLEWRAP, Isolation, IsolationError, require_isolation

PROBE = "Reply with the word ready."
PROBE_TOKENS = 64
PROBE_SCHEMA = object_schema(feedback={"type": "string"}, passed={"type": "boolean"})  # as checking operators ask
_SCHEMA_PROBE = f"Is 2 + 2 equal to 4? {object_form(PROBE_SCHEMA)}"
_SCHEMA_TOKENS = 512
_OPTIONS = frozenset({"backends", "operators", "extra_operators", "allow_no_isolation"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: its subject, whether that works, and a line about it."""

    subject: str
    works: bool
    text: str


def require_safe_programs(*, allow_no_isolation: bool = False) -> Isolation:
    """The isolation that operators' programs run in, for a start-up check; a warning where there is none.

    Raises:
        IsolationError: there is none, and `allow_no_isolation` does not accept that.
    """
    found = require_isolation(allow_none=allow_no_isolation)
    if found.name != BUBBLEWRAP:
        logging.warning("Programs that language models write run here with resource limits only (%s)", found.why)
    return found


async def examine(
    backends: Mapping[str, Backend],
    extra_operators: Iterable[str] = (),
    *,
    allow_no_isolation: bool = False,
    timeout_s: float = 30.0,
) -> list[Finding]:
    """All findings. Each backend is sent one short request."""
    answers = await asyncio.gather(*(_answers(name, backend, timeout_s) for name, backend in backends.items()))
    return [_isolation(allow_no_isolation), _operators(extra_operators), *answers]


def _isolation(allow_no_isolation: bool) -> Finding:
    try:
        isolation = require_safe_programs(allow_no_isolation=allow_no_isolation)
    except IsolationError as error:
        return Finding("isolation", False, str(error))
    why = f" ({isolation.why})" if isolation.why else ""
    return Finding("isolation", True, f"{isolation.name}{why}, programs run with {isolation.interpreter.executable}")


def _operators(extra: Iterable[str]) -> Finding:
    try:
        found = load_operators(extra)
    except OperatorRegistryError as error:
        return Finding("operators", False, str(error))
    built_in = {name: operator for name, operator in found.items() if operator.__module__.startswith("flowjax.canvas.")}
    others = [f"{name} from {found[name].__module__}" for name in found if name not in built_in]
    return Finding("operators", True, f"{len(found)}: {', '.join([*built_in, *others])}")


async def _answers(name: str, backend: Backend, timeout_s: float) -> Finding:
    subject, started_s = f"backend {name}", time.monotonic()
    request = Request([{"role": "user", "content": PROBE}], max_new_tokens=PROBE_TOKENS)
    try:
        async with asyncio.timeout(timeout_s):
            completion = await reply_of(backend, request)
        seconds, text = time.monotonic() - started_s, " ".join(completion.text.split())[:60]
    except TimeoutError:
        return Finding(subject, False, f"no answer within {timeout_s:g} s")
    except (Exception, SystemExit) as error:  # a user's own backend may raise anything; it is the finding
        # A backend of rules, or a user's own, may answer operators' requests and refuse this one. An endpoint must not.
        refused = isinstance(error, BackendError) and not isinstance(error, BackendUnavailable)
        if refused and not isinstance(backend, OpenAIBackend):
            return Finding(subject, True, f"is there, and refuses a request that is no operator's: {error}")
        return Finding(subject, False, f"no answer: {type(error).__name__}: {error}")
    if isinstance(backend, OpenAIBackend) and backend.structured and (fault := await _schema_fault(backend, timeout_s)):
        return Finding(subject, False, fault)
    return Finding(subject, True, f"answers in {seconds:.1f} s: {text!r}")


async def _schema_fault(backend: Backend, timeout_s: float) -> str:
    """Reason why the backend's replies follow no JSON schema, "" where they do, or are cut before that can be seen."""
    request = Request([{"role": "user", "content": _SCHEMA_PROBE}], max_new_tokens=_SCHEMA_TOKENS, schema=PROBE_SCHEMA)
    remedy = "set its option structured=False, or take an endpoint that knows response_format"
    try:
        async with asyncio.timeout(timeout_s):
            completion = await backend.complete(request)
        if completion.finish_reason != "length":
            object_of(completion.text, PROBE_SCHEMA)
    except TimeoutError:
        return f"no reply by a JSON schema within {timeout_s:g} s: {remedy}"
    except (BackendError, OperatorError) as error:
        return f"no reply by a JSON schema ({error}): {remedy}"
    return ""


async def silent_backends(config: Mapping[str, Mapping[str, Any]], timeout_s: float) -> list[Finding]:
    """Findings on the backends of a config that do not answer as operators need it; engines of a run are left out.

    Raises:
        BackendConfigError: one is configured wrongly.
    """
    asked = {name: dict(given) for name, given in config.items() if given.get("kind") != "run"}
    if not asked:
        return []
    async with open_backends(asked) as backends:
        found = await asyncio.gather(*(_answers(name, backend, timeout_s) for name, backend in backends.items()))
    return [finding for finding in found if not finding.works]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowjax.canvas.doctor", description="What works here.")
    parser.add_argument("--config", default="", help="a recipe (path:arg) or a JSON file with backends")
    parser.add_argument("--operators", nargs="*", default=[], help="further operators, package.module:Class")
    parser.add_argument("--allow-no-isolation", action="store_true", help="accept resource limits only")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="how long a backend may take")
    arguments = parser.parse_args(argv)
    try:
        options = read_options(arguments.config) if arguments.config else {}
        given = _configured(arguments.config, options)
        engines = [name for name, each in given.items() if isinstance(each, Mapping) and each.get("kind") == "run"]
        given = {name: each for name, each in given.items() if name not in engines}
        extra = options.get("extra_operators", ())
        if problem := type_problem(Sequence[str], extra):
            raise BackendConfigError(f"extra_operators is {shown(extra)}: {problem}")
        extra = [*extra, *arguments.operators]
        no_isolation = arguments.allow_no_isolation or bool(options.get("allow_no_isolation"))
        found = asyncio.run(_examine(given, extra, no_isolation, arguments.timeout_s))
    except BackendConfigError as error:
        print(error, file=sys.stderr)
        return 1
    found += [Finding(f"backend {name}", True, "an engine of the run, which starts it") for name in engines]
    for finding in found:
        print(f"{'ok' if finding.works else 'FAILS':6}{finding.subject}: {finding.text}")
    return 0 if all(finding.works for finding in found) else 1


def _configured(source: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The backends that a config names: none where it has other options alone."""
    has_options = source.partition(":")[0].endswith(".py") or not _OPTIONS.isdisjoint(options)
    if not source or (has_options and not options.get("backends")):
        return {}
    return read_backends(source)[0]


async def _examine(
    config: Mapping[str, Mapping[str, Any]], extra_operators: Iterable[str], allow_no_isolation: bool, timeout_s: float
) -> list[Finding]:
    async with open_backends(config) if config else contextlib.nullcontext({}) as backends:
        return await examine(backends, extra_operators, allow_no_isolation=allow_no_isolation, timeout_s=timeout_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
