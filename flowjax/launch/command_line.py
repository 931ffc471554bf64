"""`--config=path.py:arg --config.field=value ...` to a locked config; a mistake becomes one line, never a trace."""

import difflib
import importlib.util
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from flowjax.config import ConfigError

# Sections whose keys belong to what they configure, so that a recipe or a command may replace them as a whole.
OPEN_SECTIONS = {
    "agents",
    "bases",
    "model.nano",
    "policies",
    "env.options",
    "env.sources",
    "dataflow.algorithms",
    "reward.components",
    "credit.options",
    "loss.options",
}
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple such as ('a', 'b')",
    ConfigDict: "a dict",
}


def parse(
    argv: Sequence[str],
    define: Callable[[flags.FlagValues], object] = lambda values: None,
    *,
    fallback: Callable[[flags.FlagValues], ConfigDict] | None = None,
) -> tuple[ConfigDict, flags.FlagValues]:
    """The locked config that `argv` (without the program's name) describes, and the values of the other flags.

    `define` declares a command's own flags; `fallback` gives the config when there is no `--config`.

    Raises:
        ConfigError: a file, field, flag or value that is not usable.
    """
    source, rest = _take_config(argv)
    if source is None:
        if fallback is None:
            raise ConfigError("--config is missing: give a recipe, for example --config=configs/sokoban.py:nano")
        config = fallback(_parse_flags([a for a in rest if not _is_override(a)], define))
    else:
        config = load_recipe(source)
    for argument in [argument for argument in rest if _is_override(argument)]:
        _check_field(config, argument)
        if argument.partition("=")[0].lstrip("-") == "config.model.nano" and argument.lower().endswith("=none"):
            config.model.nano = None  # absl reads a section's value as a dict only
            rest.remove(argument)
    values = _parse_flags(rest, define, config)
    return config.lock(), values


def load_recipe(source: str) -> ConfigDict:
    """The config of `path.py` or `path.py:arg`.

    Raises:
        ConfigError: no such file, no `get_config` in it, or the file itself fails.
    """
    name, _, arg = source.partition(":")
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        remedy = f"did you mean {path.parent / near[0]}?" if near else "give the path of a recipe, as in configs/"
        raise ConfigError(f"--config: there is no file {path}: {remedy}")
    try:
        spec = importlib.util.spec_from_file_location(f"flowjax_recipe_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config(*([arg] if arg else []))
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        place = f"{path} line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"--config={source}: {place}: {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={source}: get_config() gave {type(config).__name__}: return a ConfigDict")
    return config


def field_paths(config: ConfigDict, prefix: str = "config") -> Iterator[str]:
    """Every field of `config`, sections and leaves, as a dotted path."""
    for key in config:
        path = f"{prefix}.{key}"
        yield path
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from field_paths(value, path)


def nearest_field(config: ConfigDict, wrong: str) -> str | None:
    """The field most likely meant by `wrong`: the same last name elsewhere, else the closest spelling."""
    paths = list(field_paths(config))
    parent, _, name = wrong.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in paths if p.rpartition(".")[0] == parent}
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        return siblings[near[0]]
    if same_name := [p for p in paths if p.endswith(f".{name}")]:
        return min(same_name, key=lambda p: (p.count("."), p))
    if siblings:  # the section is right and has nothing alike: better to list what it has
        return None
    near = difflib.get_close_matches(wrong, paths, n=1, cutoff=0.6)
    return near[0] if near else None


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    source, rest = None, []
    arguments = iter(argv)
    for argument in arguments:
        name, given, value = argument.partition("=")
        if name in ("--config", "-config"):
            source = value if given else next(arguments, "")
        else:
            rest.append(argument)
    return source, rest


def _is_override(argument: str) -> bool:
    return argument.lstrip("-").removeprefix("no").startswith("config.") and argument.startswith("-")


def _check_field(config: ConfigDict, argument: str) -> None:
    name = argument.partition("=")[0].lstrip("-")
    path = name.removeprefix("no") if name.startswith("noconfig.") else name
    parts = path.split(".")[1:]
    value: Any = config
    opened: tuple[str, Any] | None = None
    for i, key in enumerate(parts):
        here = ".".join(parts[:i])
        if here in OPEN_SECTIONS:
            opened = here, value.to_dict() if isinstance(value, ConfigDict) else value
        if isinstance(value, ConfigDict) and key in value:
            value = value[key]
            continue
        if opened:
            section, now = opened
            raise ConfigError(f"{path} is not a field: config.{section} is {now}, set it as a whole or in the recipe")
        near = nearest_field(config, path)
        known = (
            f"{'.'.join(['config', *parts[:i]])} has {', '.join(value) if isinstance(value, ConfigDict) else 'none'}"
        )
        raise ConfigError(f"{path} is not a field of this config: {f'did you mean {near}?' if near else known}")
    if isinstance(value, ConfigDict) and ".".join(parts) not in OPEN_SECTIONS:
        raise ConfigError(f"{path} is a section: set its fields one by one, for example {path}.{next(iter(value))}")


def _parse_flags(
    argv: Sequence[str], define: Callable[[flags.FlagValues], object], config: ConfigDict | None = None
) -> flags.FlagValues:
    """Absl's reading of `argv`; overrides are written into `config`."""
    values = flags.FlagValues()
    define(values)
    try:
        if config is not None:
            config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", *argv])
        left = values(["", *argv])
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(values), n=1)
        known = ", ".join(sorted(f"--{name}" for name in values))
        remedy = f"did you mean --{near[0]}?" if near else f"known are {known}"
        raise ConfigError(f"--{error.flagname} is not a flag of this command: {remedy}") from error
    except (flags.Error, ValueError, TypeError, KeyError) as error:
        raise ConfigError(_value_message(error, config)) from error
    if len(left) > 1:
        raise ConfigError(f"{left[1]!r} is not a flag: flags start with --, values follow = or a space")
    return values


def _value_message(error: Exception, config: ConfigDict | None) -> str:
    text = _one_line(error)
    # absl writes "flag --config.a.b=value: what the parser said".
    if config is None or not text.startswith("flag --config.") or "=" not in text:
        return text
    field, _, rest = text.removeprefix("flag --").partition("=")
    given, _, reason = rest.partition(": ")
    value: Any = config
    for key in field.split(".")[1:]:
        value = value[key]
    shown = value.to_dict() if isinstance(value, ConfigDict) else value
    return f"{field} takes {_KINDS.get(type(value), 'another kind of value')}, not {given!r} (now {shown!r}): {reason}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
