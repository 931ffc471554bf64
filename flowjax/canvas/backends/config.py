"""Backends by name from a config, checked before anything is sent.

    {"small": {"kind": "openai", "base_url": "http://127.0.0.1:8000/v1", "model": "base"},
     "large": {"kind": "openai", "base_url": ["https://a/v1", "https://b/v1"], "model": "m", "api_key_env": "LARGE_KEY",
               "requests_per_minute": 500, "prices": {"prompt": 0.4, "sampled": 1.6}},
     "mine":  {"kind": "my_package.backends:make", "temperature": 3}}

Nothing is guessed: an unknown name, a missing address or an unset key variable is an error that says what to do.
"""

import contextlib
import difflib
import inspect
import json
import math
import os
import re
import runpy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowjax.canvas.backends import Backend, OfflineBackend, Prices, Rule
from flowjax.canvas.backends.openai import OpenAIBackend, Patience, RateLimits
from flowjax.fields import NotNegative, declared_types, load_named, shown, type_problem

Options = dict[str, Any]

_PATIENCE_FIELDS = (
    "timeout_s", "connect_timeout_s", "retries", "first_retry_s", "last_retry_s", "longest_wait_s",
    "failures_in_a_row", "first_pause_s", "last_pause_s",
)  # fmt: skip
_LIMIT_FIELDS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_OTHER_FIELDS = ("base_url", "model", "api_key_env", "prices", "token_limit_field", "structured", "extra_body")
_OPENAI_FIELDS = (*_OTHER_FIELDS, "identity", "use_proxy", *_PATIENCE_FIELDS, *_LIMIT_FIELDS)
# Types of options that are no numbers. Unchecked, a text in place of a flag would count as true, "false" too.
_OPENAI_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("model", "api_key_env", "identity"), str),
    **dict.fromkeys(("structured", "use_proxy"), bool),
    **dict.fromkeys(("prices", "extra_body"), Mapping[str, Any]),
    "base_url": str | Sequence[Any],
}
_OFFLINE_TYPES: Mapping[str, Any] = {"rules": Sequence[Any], "seed": int, "prices": Mapping[str, Any], "identity": str}
_RULE_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("operator", "text", "error"), str),
    "answer": str | Sequence[str],
    "tags": Mapping[str, str],
    "delay_s": NotNegative,
}


class BackendConfigError(ValueError):
    """A backend that is configured wrongly; the message names the field, its value and the remedy."""


def backends_from_config(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Backend]:
    """The backends, by the names that workflows use for them.

    `kind` is "openai", "offline", or `package.module:function` of a function that gets the other options and gives a
    backend. Options that are None count as not given.

    Raises:
        BackendConfigError: one is configured wrongly; the message holds no secret.
    """
    if not config:
        raise BackendConfigError("backends is empty: configure at least one")
    return {name: _backend(f"backends.{name}", options) for name, options in config.items()}


@contextlib.asynccontextmanager
async def open_backends(config: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[dict[str, Backend]]:
    """As `backends_from_config`; closes the connections at the end.

    Raises:
        BackendConfigError: one is configured wrongly; the message holds no secret.
    """
    backends = backends_from_config(config)
    try:
        yield backends
    finally:
        await close_backends(backends)


async def close_backends(backends: Mapping[str, Backend]) -> None:
    """Close those that have a `close`, async or not."""
    for backend in backends.values():
        if (close := getattr(backend, "close", None)) is not None and inspect.isawaitable(closing := close()):
            await closing


def read_options(source: str, flag: str = "--config") -> Mapping[str, Any]:
    """The options of a JSON file, or of a recipe's `env.options`, named `path` or `path:arg`; `flag` is what an error
    names.

    Raises:
        BackendConfigError: it cannot be read.
    """
    name, _, arg = source.partition(":")
    try:
        if name.endswith(".json"):
            options = json.loads(Path(name).read_text(encoding="utf-8"))
        else:
            options = runpy.run_path(name)["get_config"](*([arg] if arg else [])).env.options.to_dict()
    except Exception as error:  # a recipe is code, and may raise anything
        raise BackendConfigError(
            f"{flag}={source} cannot be read ({type(error).__name__}: {error}): give a recipe such as "
            'configs/canvas.py:nano, or a JSON file {"backends": {...}}'
        ) from error
    if not isinstance(options, Mapping):
        raise BackendConfigError(f"{flag}={source} holds a {type(options).__name__}: give an object with backends")
    return options


def read_backends(source: str) -> tuple[Mapping[str, Any], str]:
    """The backends of a config, or of a JSON file that holds nothing else, and the name of the one that answers calls
    that name none: `default_backend`, or else the first.

    Raises:
        BackendConfigError: it cannot be read, or is a recipe without backends, whose world brings its own executor.
    """
    options = read_options(source, "--backends")
    if "backends" in options or not source.partition(":")[0].endswith(".py"):
        backends = options.get("backends", options)
        if not isinstance(backends, Mapping):
            raise BackendConfigError(f"backends is {shown(backends)}: give an object, the options of each by its name")
        default = options.get("default_backend") or next(iter(backends), "")
        if backends and default not in list(backends):
            raise BackendConfigError(f"default_backend is {default!r}: use one of {', '.join(backends)}")
        return backends, default
    raise BackendConfigError(
        f"--backends={source} names no env.options.backends, so that its world's own executor answers, which is for "
        'training: give a JSON file {"backends": {...}}'
    )


def _backend(where: str, options: Mapping[str, Any]) -> Backend:
    if not isinstance(options, Mapping):
        raise BackendConfigError(f'{where} is {options!r}: give an object such as {{"kind": "openai", ...}}')
    given = {name: value for name, value in options.items() if value is not None}
    kind = given.pop("kind", None)
    if kind == "openai":
        return _openai(where, given)
    if kind == "offline":
        return _offline(where, given)
    if isinstance(kind, str) and ":" in kind:
        return _of_path(where, kind, given)
    engine = ", an engine of a training run, which only its world can ask" if kind == "run" else ""
    raise BackendConfigError(f'{where}.kind is {kind!r}{engine}: give "openai", "offline" or package.module:function')


def _openai(where: str, given: Options) -> Backend:
    _refuse_unknown(where, given, _OPENAI_FIELDS)
    _check_types(where, given, _OPENAI_TYPES)
    urls = _required(where, given, "base_url", "an address such as http://127.0.0.1:8000/v1, or a list of them")
    urls = [urls] if isinstance(urls, str) else list(urls)
    for url in urls or [""]:
        _check_url(f"{where}.base_url", url)
    model = _required(where, given, "model", "the model's name at the endpoint")
    variable = given.pop("api_key_env", "")
    key = _key(where, variable) if variable else ""
    prices = _prices(where, given)
    patience, limits = _numbers(where, given, _PATIENCE_FIELDS), _numbers(where, given, _LIMIT_FIELDS)
    if given.get("token_limit_field", "max_tokens") not in ("max_tokens", "max_completion_tokens"):
        raise BackendConfigError(
            f"{where}.token_limit_field is {given['token_limit_field']!r}: give max_tokens or max_completion_tokens"
        )
    return OpenAIBackend(
        urls,
        model,
        api_key=key,
        patience=Patience(**patience),
        limits=RateLimits(**limits),
        prices=prices,
        **given,
    )


def _offline(where: str, given: Options) -> Backend:
    _refuse_unknown(where, given, tuple(_OFFLINE_TYPES))
    _check_types(where, given, _OFFLINE_TYPES)
    rules = _required(where, given, "rules", 'a list such as [{"operator": "Custom", "answer": "42"}]')
    for index, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            _check_types(where, {f"rules[{index}]": rule}, {f"rules[{index}]": Mapping[str, Any]})
            _refuse_unknown(f"{where}.rules[{index}]", rule, tuple(_RULE_TYPES))
            _check_types(f"{where}.rules[{index}]", rule, _RULE_TYPES)
            _check_pattern(f"{where}.rules[{index}].text", rule.get("text", ""))
            if rule.get("answer") in ([], ()):
                raise BackendConfigError(f"{where}.rules[{index}].answer is empty: give a text, or several")
    prices = _prices(where, given)
    return OfflineBackend([rule if isinstance(rule, Rule) else Rule(**rule) for rule in rules], prices=prices, **given)


def _of_path(where: str, path: str, given: Options) -> Backend:
    make: Callable[..., Backend] = load_named(f"{where}.kind", path, BackendConfigError)
    try:
        _check_types(where, given, declared_types(make.__init__ if isinstance(make, type) else make))
        _check_types(where, given, {"prices": Mapping[str, Any]})
        _prices(where, dict(given))  # where it takes any: prompts show them
        backend = make(**given)
    except TypeError as error:
        raise BackendConfigError(f"{where}: {path} does not take the options {sorted(given)}: {error}") from error
    except BackendConfigError:
        raise
    except Exception as error:  # a module of the user's own may fail in any way
        raise BackendConfigError(f"{where}: {path} cannot be had ({type(error).__name__}: {error}): mend it") from error
    # Checked here: later, a missing one would fail at the first request, as if the workflow were at fault.
    if not isinstance(getattr(backend, "identity", None), str) or not callable(getattr(backend, "complete", None)):
        raise BackendConfigError(
            f"{where}: {path} gives {shown(backend)}, which is no backend: give an object with `identity`, a text, and "
            "`async def complete(self, request)`"
        )
    if not inspect.iscoroutinefunction(inspect.unwrap(backend.complete)):
        raise BackendConfigError(
            f"{where}: {path} gives {shown(backend)}, whose `complete` cannot be awaited: write it as "
            "`async def complete(self, request)`"
        )
    return backend


def _check_pattern(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise BackendConfigError(f"{where} is {pattern!r}, which is no regular expression: {error}") from error


def _check_url(where: str, url: object) -> None:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, usable = urlsplit(""), False
    secret = parts.username or parts.password or parts.query or "@" in str(url)
    if secret:  # first, since the message below has the address in it
        raise BackendConfigError(
            f"{where} holds a user, a password or a query: put the key into an environment variable and name that in "
            "api_key_env"
        )
    if not usable:
        raise BackendConfigError(f"{where} is {url!r}: give an address such as http://127.0.0.1:8000/v1")


def _key(where: str, variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise BackendConfigError(
            f"{where}.api_key_env names the environment variable {variable}, which is not set: export it, or leave "
            "api_key_env out for an endpoint that needs no key"
        )
    if not key.isascii() or not key.isprintable():
        raise BackendConfigError(
            f"{where}.api_key_env: {variable} holds characters that no key has: export it again, without a line break"
        )
    return key


def _prices(where: str, given: Options) -> Prices:
    prices = dict(given.pop("prices", {}))
    _refuse_unknown(f"{where}.prices", prices, ("prompt", "sampled"))
    return Prices(**_numbers(f"{where}.prices", prices, ("prompt", "sampled")))


def _numbers(where: str, given: Options, names: tuple[str, ...]) -> dict[str, Any]:
    """Remove these options from `given` and return those that are there; refuse values that are no sensible number."""
    numbers = {name: given.pop(name) for name in names if name in given}
    for name, value in numbers.items():
        may_be_zero = name in ("retries", "prompt", "sampled", "first_retry_s", "last_retry_s", "longest_wait_s")
        whole = name in ("retries", "concurrency", "failures_in_a_row")
        # In Python a bool is an int, too.
        wrong = isinstance(value, bool) or not isinstance(value, int if whole else int | float)
        if wrong or not (value >= 0 if may_be_zero else value > 0) or not math.isfinite(value):
            kind = "a whole number" if whole else "a number"
            raise BackendConfigError(
                f"{where}.{name} is {value!r}: give {kind} {'from 0 on' if may_be_zero else 'above 0'}"
            )
    return numbers


def _required(where: str, given: Options, name: str, remedy: str) -> Any:
    if not (value := given.pop(name, None)):
        raise BackendConfigError(f"{where}.{name} is missing: give {remedy}")
    return value


def _check_types(where: str, given: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in types and (remedy := type_problem(types[name], value)):
            raise BackendConfigError(f"{where}.{name} is {shown(value)}: {remedy}")


def _refuse_unknown(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
            raise BackendConfigError(f"{where}.{name} is not an option: {meant}")
