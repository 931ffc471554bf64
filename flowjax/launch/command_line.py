"""From `--config=path.py:arg,estimator --config.field=value ...` to a locked config; a mistake becomes one line, never
a trace.

Absl parses the values of fields by their types. A value in an open section (options, policies, sources) is parsed as a
Python literal, or else kept as text, even if the recipe does not mention it: later checks refuse unknown options.
"""

import ast
import difflib
import functools
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

from flowjax.config import FIELDS, OWNER_OF_OPTIONS, ConfigError, default_options
from flowjax.credit import ESTIMATORS
from flowjax.fields import NAMED, Free, nearest, shown
from flowjax.launch.checks import check_config
from flowjax.run import field_problems

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple such as ('a', 'b')",
    ConfigDict: "a dict",
}
_NO_WORD = object()


def committed_checkpoint(named: Path) -> tuple[Path, str, int]:
    """Run folder, policy and step of a checkpoint's path, `<run>/checkpoints/<policy>/<step>`, absolute or relative.

    Raises:
        ConfigError: it is no committed checkpoint.
    """
    from flowjax.weights.publish import committed_steps  # imported here: it imports JAX, which a launch does not need

    folder, step = named.absolute().parent, named.absolute().name
    steps = committed_steps(folder) if folder.is_dir() else []
    if not step.isdecimal() or int(step) not in steps:
        there = f"{folder} has committed steps {steps}" if steps else f"{folder} has none"
        if (named / "config.json").exists():  # a run folder
            newest = {each: committed_steps(each)[-1:] for each in sorted((named / "checkpoints").glob("*"))}
            names = [str(policy / str(step)) for policy, last in newest.items() for step in last]
            there = f"it is a run folder: give one of its checkpoints, such as {' or '.join(names) or 'none yet'}"
        raise ConfigError(f"--checkpoint={named} is not a committed checkpoint: {there}")
    return folder.parent.parent, folder.name, int(step)


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
    plain, entries = _split_overrides(config, rest)
    for line in _drop_options(config, {**_given(plain), **dict(entries)}):
        print(line, file=sys.stderr)
    values = _parse_flags(plain, define, config)
    named = {section: tuple(config[section]) for section in ("policies", "bases")}
    for path, text in entries:
        _set_entry(config, path, text, named)
    if field_problems(config):
        raise ConfigError("\n".join(check_config(config)))
    return config.lock(), values


def run_file(path: Path, name: str) -> ModuleType:
    """A module of that name, run from the file as it is. Python's import would run the compiled copy, if that was made
    of a file of the same size and time in whole seconds: of two recipes written in turn, the first one twice."""
    module = ModuleType(name)
    module.__file__ = str(path.absolute())
    sys.modules[name] = module  # where dataclasses look up annotations that are text
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


def load_recipe(source: str) -> ConfigDict:
    """The config of `path.py`, `path.py:arg` or `path.py:arg,estimator`.

    Where `arg,estimator` is itself one of the recipe's VARIANTS, that variant is meant.

    Raises:
        ConfigError: no such file, no `get_config` in it, or the file itself fails; an unknown estimator.
    """
    name, _, arg = source.partition(":")
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        remedy = f"did you mean {path.parent / near[0]}?" if near else "give the path of a recipe, as in configs/"
        raise ConfigError(f"--config: there is no file {path}: {remedy}")
    if path.suffix != ".py":
        raise ConfigError(f"--config: {path} is no Python file: give a recipe, as in configs/")
    try:
        module = run_file(path, f"flowjax_recipe_{path.stem}")
        variant, comma, estimator = (arg, "", "") if arg in getattr(module, "VARIANTS", ()) else arg.partition(",")
        if comma:
            _check_estimator(estimator)
        config = module.get_config(*([variant] if variant else []))
    except ConfigError as error:
        raise ConfigError(f"--config={source}: {error}") from error
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        place = f"{path} line {frames[-1].lineno}" if frames else str(path)
        if frames and isinstance(error, TypeError):  # of ConfigDict, which names the last part of a field alone
            place = f"{place} ({frames[-1].line})"
        text = f"{type(error).__name__}: {_one_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            text += f": modules beside it are found with PYTHONPATH={path.parent}, others have to be installed"
        raise ConfigError(f"--config={source}: {place}: {text}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={source}: get_config() gave {type(config).__name__}: return a ConfigDict")
    config = ConfigDict(config) if isinstance(config, FrozenConfigDict) else config
    if lacking := list(FIELDS.lacking("config", config)):
        raise ConfigError(f"--config={source}: {'; '.join(lacking)}")
    if comma:
        _name_estimator(config, estimator)
    return config


def _check_estimator(name: str) -> None:
    """Refuse a name that no estimator can have. One at package.module:function is imported later, by the probe."""
    if name not in ESTIMATORS and not (name and NAMED.fits(name)):
        raise ConfigError(
            f"there is no estimator {name!r}{nearest(name, ESTIMATORS)}: use one of {', '.join(ESTIMATORS)}, or "
            "package.module:function for your own"
        )


def _name_estimator(config: ConfigDict, name: str) -> None:
    """Set the estimator of a recipe's config, and append it to the run's name."""
    before = config.credit.name
    for line in _drop_options(config, {"credit.name": name}):
        print(line, file=sys.stderr)
    config.credit.name = name
    if config.name and name != before:
        config.name = f"{config.name}-{name.rpartition(':')[2]}"


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
        if alike := difflib.get_close_matches(wrong, same_name, n=1, cutoff=0.9):  # the section is mistyped
            return alike[0]
        return min(same_name, key=lambda p: (p.count("."), p))
    if siblings:  # the section exists, and has no similar field: the caller lists its fields
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


def _split_overrides(config: ConfigDict, argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Arguments for absl, and (path, text) of those that set an open section or a value in one.

    Raises:
        ConfigError: an override of a field that does not exist.
    """
    plain: list[str] = []
    entries: list[tuple[str, str]] = []
    arguments = iter(argv)
    for argument in arguments:
        if not _is_override(argument):
            plain.append(argument)
            continue
        name, given, text = argument.partition("=")
        path = _path(argument)
        if _open_section(path) is None:
            _check_field(config, path)
            plain.append(argument)
        elif name.lstrip("-").startswith("noconfig."):
            entries.append((path, "False"))
        else:
            entries.append((path, text if given else next(arguments, "True")))
    for path, text in _given(plain).items():
        if isinstance(functools.reduce(operator.getitem, path.split("."), config), tuple):
            _check_tuple(path, text)
    return plain, entries


def _check_tuple(path: str, text: str) -> None:
    """Refuse a text that is no Python literal and may stand for another one, or for several: absl takes it as it is."""
    if "," not in text and "\\" not in text:
        return
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        remedy = "put its texts in quotes, also where it is one"
        raise ConfigError(f"config.{path} takes {_KINDS[tuple]}, not {text!r}: {remedy}") from error


def _path(argument: str) -> str:
    """`trainer.steps` of `--config.trainer.steps=3`."""
    name = argument.partition("=")[0].lstrip("-")
    return (name.removeprefix("no") if name.startswith("noconfig.") else name).removeprefix("config.")


def _open_section(path: str) -> str | None:
    """The open section that a path names or lies in; None for a path of declared fields."""
    parts = path.split(".")
    prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return next((prefix for prefix in prefixes if isinstance(FIELDS.find(prefix), Free)), None)


def _given(argv: Sequence[str]) -> dict[str, str]:
    """Values, as text, of the overrides among arguments, by path."""
    # `--config.a=b`, or `--config.a b`: then the value is the argument after it.
    return {
        _path(argument): argument.partition("=")[2] if "=" in argument else after
        for argument, after in zip(argv, [*argv[1:], ""], strict=False)
        if _is_override(argument)
    }


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Value of a flag, after `=` or a space; None where it is not given."""
    for index, argument in enumerate(argv):
        name, given, value = argument.partition("=")
        if name == f"--{flag}":
            return value if given else "".join(argv[index + 1 : index + 2])
    return None


def _drop_options(config: ConfigDict, given: dict[str, str]) -> Iterator[str]:
    """Reset options where the command line names another estimator, objective or world than the recipe does.

    They were chosen for the former one, and the new one lacks most of them. Yields a line to print for each reset.
    """
    policies = {f"policies.{name}.": part for name, part in config.policies.items() if isinstance(part, ConfigDict)}
    for options, owner in OWNER_OF_OPTIONS.items():
        section, _, name = owner.partition(".")
        before = config[section][name]
        for place, holder in {"": config, **policies}.items():
            part = holder.get(section)
            if not isinstance(part, ConfigDict):
                continue
            now = part.get(name, before)
            # Precedence: an override for this policy alone, the policy's own value, an override for the whole run.
            new = given.get(f"{place}{owner}", now if name in part else given.get(owner, now))
            if new == now or "options" not in part or (section == "env" and _has_options_of(str(now), str(new))):
                continue
            left_out = part.options.to_dict()
            part.options = default_options(options) if holder is config else ConfigDict()
            # `env.sources` and the warm start hold options of the world, too.
            warm = config.warm_start
            for beside, field in ((config.env, "sources"), (warm, "env_options"), (warm, "noisy_env_options")):
                if section == "env" and beside[field]:
                    left_out[field], beside[field] = beside[field].to_dict(), ConfigDict()
            if left_out != part.options.to_dict():
                listed = ", ".join(f"{option}={value!r}" for option, value in left_out.items())
                yield f"config.{place}{owner} is {new!r}: the options of {now!r} are left out ({listed})"


def _has_options_of(world: str, other: str) -> bool:
    """True if `other` has all options of `world`, as the published form of a world does."""
    from flowjax.envs import WorldError, find_world  # which imports numpy: most launches do without

    try:
        return issubclass(find_world(other).Options, find_world(world).Options)
    except WorldError:  # named by the checks that follow
        return False


def _set_entry(config: ConfigDict, path: str, text: str, named: Mapping[str, Sequence[str]]) -> None:
    """Set an open section, or the entry of one at `path`, to the value of `text`.

    `named` lists the policies and bases of the recipe: where it names some, an override cannot add one.

    Raises:
        ConfigError: no such policy or base, or a section where a value should be, or the other way round.
    """
    opened = FIELDS.find(path)
    *parents, last = path.split(".")
    now: Any = config
    with config.unlocked():
        for index, name in enumerate(parents):
            here = ".".join(parents[: index + 1])
            if now.get(name) is None:
                _check_known(config, here, named)
                now[name] = ConfigDict()
            now = now[name]
            if not isinstance(now, ConfigDict):
                raise ConfigError(f"config.{path} cannot be set: config.{here} is {shown(now)}, set it as a whole")
        value = _literal(text, now.get(last))
        if (
            isinstance(opened, Free)
            and not isinstance(value, dict)
            and (value is not None or opened.default is not None)
        ):
            raise ConfigError(f"config.{path} takes {_KINDS[ConfigDict]}, not {text!r} (now {shown(now.get(last))})")
        _check_known(config, path, named)
        with now.ignore_type():
            now[last] = ConfigDict(value) if isinstance(value, dict) else value


def _check_known(config: ConfigDict, path: str, named: Mapping[str, Sequence[str]]) -> None:
    """Refuse a policy or base that the recipe, which names some, lacks: most likely it is mistyped."""
    section, _, name = path.partition(".")
    if name and "." not in name and named.get(section) and name not in config[section]:
        listed = ", ".join(config[section])
        raise ConfigError(f"config.{path} is not there{nearest(name, config[section])}: config.{section} has {listed}")


def _literal(text: str, now: Any) -> Any:
    """Value of a Python literal, or of true, false or none in any case; else the text itself.

    `now` is the entry's present value: where that is text, the new one is text as well.
    """
    if isinstance(now, str):
        return text
    try:
        # A sentinel for "none of these words", since None is the value of one of them.
        value = {"true": True, "false": False, "none": None}.get(text.lower(), _NO_WORD)
        value = ast.literal_eval(text) if value is _NO_WORD else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if isinstance(now, tuple) and not isinstance(value, tuple | list | dict):
        return (value,)
    return tuple(value) if isinstance(value, list | set) else value


def _check_field(config: ConfigDict, path: str) -> None:
    parts, value = path.split("."), config
    for index, key in enumerate(parts):
        if isinstance(value, ConfigDict) and key in value:
            value = value[key]
            continue
        near = nearest_field(config, f"config.{path}")
        section = ".".join(["config", *parts[:index]])
        known = f"{section} has {', '.join(value) if isinstance(value, ConfigDict) else 'none'}"
        raise ConfigError(f"config.{path} is not a field of this config: {f'did you mean {near}?' if near else known}")
    if isinstance(value, ConfigDict):
        first = f"config.{path}.{next(iter(value))}"
        raise ConfigError(f"config.{path} is a section: set its fields one by one, for example {first}")


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
        forms = "flags start with --, values follow = or a space, an evaluation's run folders stand before them"
        raise ConfigError(f"{left[1]!r} is not a flag: {forms}")
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
