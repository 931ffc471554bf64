"""A run, resolved once from its config: its policies, base models and engines, and who speaks for each agent.

A role or a command makes a `Run` when it starts and hands each room the part that it needs. `config.policies` and
`config.bases` hold only differences; here every policy and base has its sections whole.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ml_collections import ConfigDict

from flowjax.config import BASE_NAME, FIELDS, OWNER_OF_OPTIONS, ConfigError, default_options, load_run
from flowjax.fields import NAME, Entry, Free, Section, shown
from flowjax.files import digest_of, replace_file

PER_BASE = ("model", "engine", "warm_start")  # sections that a base model may have of its own
PER_POLICY = ("policy", "reward", "credit", "loss", "trainer", "optimizer")  # and a policy
# Fields of `trainer` that hold for its process, whichever policies it trains.
_OF_ALL_POLICIES = ("processes", "coordinator", "compile_cache", "step_timeout_s")
ONLY_AGENT = "agent"  # of a workflow that has one
TAUGHT_FILE = "warm_start.json"  # in the folder of a base model that was made here: its section of that name
_ENDPOINTS_FILE = "endpoints.json"
_MODELS_FILE = "models.json"


@dataclass(frozen=True)
class Engine:
    """One vLLM server of a base model.

    name: of its role, its log and its entry in endpoints.json.
    replica: its number among the engines of the same base, from 0.
    port: fixed by the config; 0 for a free one.
    url: address of an engine that runs elsewhere, "" for one that the launcher starts.
    """

    name: str
    base: str
    replica: int
    port: int = 0
    url: str = ""


@dataclass(frozen=True)
class Base:
    """A model as it was downloaded or made, and the engines that serve it.

    model, engine, warm_start: the config's sections, with this base's differences.
    engines: none if a rollout service elsewhere has engines of its own.
    """

    name: str
    model: ConfigDict
    engine: ConfigDict
    warm_start: ConfigDict
    engines: tuple[Engine, ...]

    def engine_names(self, count: int) -> list[str]:
        """Names of `count` engines of this base."""
        stem = "engine" if self.name == BASE_NAME else f"engine-{self.name}"
        return [stem] if count == 1 else [f"{stem}-{index}" for index in range(count)]

    def weights_digest(self) -> str:
        """Digest of a nano base's weights: another one may be made under the same path. "" for other models, which are
        large and not made by a run, and where there are no weights."""
        files = sorted(Path(self.model.path).glob("*.safetensors")) if self.model.nano is not None else ()
        return ",".join(map(digest_of, files))

    @property
    def logs(self) -> str:
        """Place where its engines' logs are read."""
        if self.engine.urls:
            return "the engines' own logs"
        return f"logs/{self.engine_names(1)[0]}{'-*' if self.engine.replicas > 1 else ''}.log"


@dataclass(frozen=True)
class Policy:
    """One policy: the base that it is trained on, and the config's sections with this policy's differences.

    train: "lora" for an adapter, of the shape `lora`; "full" for all weights of its base.
    """

    name: str
    base: Base
    train: str
    lora: ConfigDict
    reward: ConfigDict
    credit: ConfigDict
    loss: ConfigDict
    trainer: ConfigDict
    optimizer: ConfigDict


@dataclass(frozen=True)
class Run:
    """A run as its config means it.

    config: locked, as config.json has it. Read `model`, `engine` and the sections of `PER_POLICY` from `bases` and
        `policies`; the other sections hold for the whole run.
    folder: of the run.
    policies, bases: by name; "base" is the base model of the run's own section `model`.
    agents: agent of the workflow -> the policy that speaks for it, or the base model as it is.
    """

    config: ConfigDict
    folder: Path
    policies: dict[str, Policy]
    bases: dict[str, Base]
    agents: Mapping[str, str]

    @property
    def is_evaluation(self) -> bool:
        """True of a run of `flowjax.evaluate`: nothing is trained, and there is no dataflow."""
        return bool(self.config.eval.versions)

    @property
    def trains(self) -> bool:
        """True where a part of the trainer is on this machine: other machines need not fit its mesh."""
        return "trainer" not in self.config.elsewhere and not self.is_evaluation

    @property
    def trained_remotely(self) -> bool:
        """True where the run's launch leaves the trainer to other hosts, or to a program of the user's."""
        return "trainer" in self.config.elsewhere and not self.is_node

    @property
    def is_node(self) -> bool:
        """True of a machine that plays for a run of another machine, which has the dataflow and the trainer."""
        return "dataflow" in self.config.elsewhere

    @property
    def is_relayed(self) -> bool:
        """True if the run and its nodes reach each other over a NATS server (`flowjax.relay`)."""
        return is_nats(self.config.dataflow.url) if self.is_node else bool(self.config.dataflow.relay)

    @property
    def presence_s(self) -> float:
        """Seconds between the heartbeats of a worker or node that has nothing else to report: its requests for
        episodes, versions or the run's end are held this long at most, and a worker reports its versions this often."""
        return min(max(self.config.dataflow.lease_s / 12, 1.0), 10.0)

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(engine for base in self.bases.values() for engine in base.engines)

    def policies_on(self, base: str) -> dict[str, Policy]:
        """The policies that are trained on a base model, by name."""
        return {name: policy for name, policy in self.policies.items() if policy.base.name == base}

    @property
    def replaced_bases(self) -> set[str]:
        """Base models whose own weights a policy trains: their engines have no copy of them as they were."""
        return {policy.base.name for policy in self.policies.values() if policy.train == "full"}


def is_nats(url: str) -> bool:
    """True if a run's address is at a NATS server: `<servers>/<run id>`."""
    return urlsplit(url).scheme in ("nats", "tls", "ws", "wss")


def read_run(folder: Path) -> Run:
    """The run of a folder.

    Raises:
        ConfigError: there is no readable config.json, or its content is no config.
    """
    run = resolve(load_run(folder), folder)
    check_agents(run)
    return run


def resolve(
    config: ConfigDict, folder: Path | None = None, models: Mapping[str, Mapping[str, str]] | None = None
) -> Run:
    """The run that a config means; later changes of `config` do not affect it.

    Args:
        config: as a recipe or config.json has it.
        folder: of the run, which need not exist yet; None if it is not needed.
        models: base models that were fetched (`write_models`); None for those that are noted in the folder.

    Raises:
        ConfigError: a name that no base or policy can have, a section that they share, or an unknown field; a policy's
            base is unknown.
    """
    config = ConfigDict(config.to_dict()).lock()
    sections = {BASE_NAME: {section: config[section] for section in PER_BASE}}
    sections |= {name: base_sections(config, name) for name in config.bases}
    fetched = models if models is not None else read_models(folder) if folder else {}
    for name, parts in sections.items():
        parts["model"] = _fetched(parts["model"], fetched.get(name, {}))
    started = "rollout" not in config.elsewhere
    bases = {name: _base(name, **parts, started=started) for name, parts in sections.items()}
    alone = {} if config.policies else {config.policy.name: {section: config[section] for section in PER_POLICY}}
    differing = {name: policy_sections(config, name) for name in config.policies}
    policies = {name: _policy(name, sections, bases) for name, sections in {**alone, **differing}.items()}
    agents = config.agents.to_dict() or {ONLY_AGENT: next(iter(policies))}
    return Run(config, folder or Path(), policies, bases, agents)


def _fetched(model: ConfigDict, found: Mapping[str, str]) -> ConfigDict:
    """The section with the folder of a model that was fetched by its id; unchanged if that folder is gone, so that the
    launcher fetches it again."""
    if model.path != found.get("path") or not Path(found["folder"]).is_dir():
        return model
    return ConfigDict({**model.to_dict(), "path": found["folder"]}).lock()


def _base(name: str, model: ConfigDict, engine: ConfigDict, warm_start: ConfigDict, *, started: bool) -> Base:
    bare = Base(name, model, engine, warm_start, ())
    # Bounded here, too: a huge number, which the config's declaration refuses later, must not fill memory with engines.
    declared = FIELDS.find("engine.replicas")
    assert isinstance(declared, Entry) and declared.at_most is not None
    count = len(engine.urls) or min(engine.replicas, int(declared.at_most))
    if not started:  # another machine plays, with engines of its own
        return bare
    names = bare.engine_names(count)
    urls = engine.urls or [""] * len(names)
    ports = [engine.port and engine.port + replica for replica in range(len(names))]
    engines = tuple(
        Engine(each, name, replica, port, url)
        for replica, (each, port, url) in enumerate(zip(names, ports, urls, strict=True))
    )
    return replace(bare, engines=engines)


def _policy(name: str, sections: Mapping[str, ConfigDict], bases: Mapping[str, Base]) -> Policy:
    trained, rest = sections["policy"], {section: sections[section] for section in PER_POLICY[1:]}
    if trained.base not in bases:
        raise ConfigError(
            f"config.policy.base is {trained.base!r} for policy {name}, but there is no such base model: use one of "
            f"{', '.join(bases)}"
        )
    return Policy(name, bases[trained.base], trained.train, trained.lora, **rest)


def base_sections(config: ConfigDict, name: str) -> dict[str, ConfigDict]:
    """The sections of `PER_BASE` as one of `config.bases` has them.

    Raises:
        ConfigError: a name that is not allowed, a section that all bases share, or an unknown field.
    """
    if name == BASE_NAME or not NAME.fits(name) or name.rpartition("-")[2].isdecimal():
        raise ConfigError(
            f"config.bases has {shown(name)}: {NAME.remedy}, other than {BASE_NAME!r}, that is no number and does not "
            "end in '-' and one, as replicas do"
        )
    if name in (config.policies or (config.policy.name,)):
        raise ConfigError(f"config.bases.{name} is also the name of a policy: give one of them another")
    changes = config.bases[name]
    if not isinstance(changes, ConfigDict):
        raise ConfigError(f"config.bases.{name} is {shown(changes)}: give a dict such as {{'model': {{'path': ...}}}}")
    sections = _copies(config, PER_BASE)
    sections["engine"].update({"port": 0, "urls": ()})
    if "path" in changes.get("model", {}):
        sections["model"].nano = None
    _change(sections, f"config.bases.{name}", changes, config)
    return sections


def policy_sections(config: ConfigDict, name: str) -> dict[str, ConfigDict]:
    """The sections of `PER_POLICY` as a policy has them.

    Raises:
        ConfigError: a name that is not allowed, a section that all policies share, or an unknown field.
    """
    if not isinstance(name, str) or not NAME.fits(name):
        raise ConfigError(f"config.policies has {shown(name)}: {NAME.remedy}")
    changes = config.policies.get(name, ConfigDict())
    if not isinstance(changes, ConfigDict):
        raise ConfigError(f"config.policies.{name} is {shown(changes)}: give a dict such as {{'optimizer': {{...}}}}")
    trainer = changes.get("trainer", {})
    for field in _OF_ALL_POLICIES if isinstance(trainer, ConfigDict | Mapping) else ():
        if trainer.get(field, config.trainer[field]) != config.trainer[field]:
            raise ConfigError(
                f"config.policies.{name}.trainer.{field} is {shown(trainer[field])}, but policies have it in common: "
                f"set config.trainer.{field}"
            )
    sections = _copies(config, PER_POLICY)
    sections["policy"].name = name
    _change(sections, f"config.policies.{name}", changes, config)
    if sections["policy"].name != name:
        raise ConfigError(
            f"config.policies.{name}.policy.name is {shown(sections['policy'].name)}, but the policy is named {name!r} "
            "by its place in config.policies: leave it out, or rename that"
        )
    return sections


def _copies(config: ConfigDict, sections: Iterable[str]) -> dict[str, ConfigDict]:
    return {section: ConfigDict(config[section].to_dict()) for section in sections}


def _change(sections: Mapping[str, ConfigDict], field: str, changes: ConfigDict, config: ConfigDict) -> None:
    """Write `changes`, the config at `field`, into `sections`, and lock these.

    Raises:
        ConfigError: another section than these, an unknown field, or a value of another type.
    """
    for section, values in changes.items():
        if section not in sections:
            remedy = f"set config.{section} for all of them" if section in config else "use one of these"
            allowed = ", ".join(sections)
            raise ConfigError(f"{field}.{section} is set, but {field} may differ only in {allowed}: {remedy}")
        if not isinstance(values, ConfigDict | Mapping):
            raise ConfigError(f"{field}.{section} is {shown(values)}: give a dict of the fields that differ")
        # Another estimator or objective than the run's begins with its own defaults, not with the options of the run's.
        for options, owner in OWNER_OF_OPTIONS.items():
            name = owner.removeprefix(f"{section}.")
            if name in values and values[name] != sections[section][name]:
                sections[section].options = default_options(options)
        for name, value in values.items():
            if name not in sections[section]:
                raise ConfigError(f"{field}.{section}.{name} is no field: use one of {', '.join(sections[section])}")
            # Entry by entry, as sections are; components of a reward are a policy's own, and replace the run's.
            if name.endswith("options") and isinstance(value, ConfigDict | Mapping):
                value = {**sections[section][name].to_dict(), **dict(value)}
            try:
                if isinstance(sections[section][name], ConfigDict) and not isinstance(
                    FIELDS.find(f"{section}.{name}"), Free
                ):
                    sections[section][name].update(value)
                else:
                    sections[section][name] = value
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(_misfit(f"{section}.{name}", f"{field}.{section}.{name}", value)) from error
    for section in sections.values():
        section.lock()


def _misfit(path: str, field: str, value: object) -> str:
    """Message about a value that does not fit the field at `path`, in the words of the field's declaration."""
    declared = FIELDS.find(path)
    if isinstance(declared, Section):
        found = declared.problems(field, value, complete=False)
    else:
        found = declared.problems(field, value) if declared else iter(())
    return next(found, f"{field} is {shown(value)}, which does not fit: see docs/config.md")


def field_problems(config: ConfigDict) -> list[str]:
    """Messages about values that their declarations do not allow and fields that are not declared, also those of bases
    and policies."""
    if problems := list(FIELDS.problems("config", config)):
        return problems
    try:
        resolve(config)
    except ConfigError as error:
        return [str(error)]
    parts = [(f"config.bases.{name}", base_sections(config, name)) for name in config.bases]
    parts += [(f"config.policies.{name}", policy_sections(config, name)) for name in config.policies]
    return [
        text
        for path, sections in parts
        for section, values in sections.items()
        for text in FIELDS.fields[section].problems(f"{path}.{section}", values)
    ]


def check_agents(run: Run) -> None:
    """Check that a policy or base model of the run speaks for each agent, and a trained one for at least one agent.

    Raises:
        ConfigError: an agent's policy is none of the run's, its base model is replaced by trained weights, or only base
            models speak, in a run that is no evaluation.
    """
    for agent, model in run.agents.items():
        if model not in (*run.policies, *run.bases):
            as_is = "base models as they are" if len(run.bases) > 1 else "base model as it is"
            frozen = f"{', '.join(map(repr, run.bases))} for the {as_is}"
            raise ConfigError(
                f"config.agents.{agent} is {model!r}: use one of the run's policies, {', '.join(run.policies)}, or "
                f"{frozen}"
            )
        if model in run.replaced_bases:
            raise ConfigError(
                f"config.agents.{agent} is {model!r}, but with config.policy.train 'full' the engine replaces the "
                "base model by what is trained: name a policy, or train 'lora'"
            )
    models = dict.fromkeys(run.agents.values())
    if models.keys() <= run.bases.keys() and not run.is_evaluation:
        spoken = ", ".join(map(repr, models))
        raise ConfigError(f"config.agents has {spoken} speak for every agent, so nothing is trained: name a policy")


def read_models(folder: Path) -> dict[str, dict[str, str]]:
    """Base models that a run's launcher fetched, if any: name -> `path` (the field's value), `revision`, `folder`.

    Raises:
        ConfigError: the note is damaged, or may not be read.
    """
    path = folder / _MODELS_FILE
    try:
        noted = json.loads(path.read_text())
        return {name: {part: str(of[part]) for part in ("path", "revision", "folder")} for name, of in noted.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}): see that this user may read it and its folder") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read ({reason}): remove it, and the newest models are fetched") from error


def write_models(folder: Path, models: Mapping[str, Mapping[str, str]]) -> None:
    """Note the models and revisions that a run was started with; nothing if all are folders."""
    if models:
        replace_file(folder / _MODELS_FILE, json.dumps(dict(models), indent=2) + "\n")


def read_endpoints(folder: Path) -> dict[str, str]:
    """Address of each server of the run in `folder`, by role: engines and "dataflow".

    Raises:
        OSError, ValueError: they are not known (yet).
    """
    if not isinstance(found := json.loads((path := folder / _ENDPOINTS_FILE).read_text()), dict):
        raise ValueError(f"{path} holds no addresses")
    return found


def write_endpoints(folder: Path, urls: Mapping[str, str]) -> None:
    """Write down where servers listen. Roles read it again: an address changes when another process takes the port."""
    replace_file(folder / _ENDPOINTS_FILE, json.dumps(dict(urls)))


def played_in(run: Run) -> dict[str, Any]:
    """Tasks, players and bounds of a run's config, as JSON has them: equal for runs whose results can be compared."""
    config = run.config
    found = {
        "world": config.env.name,
        "options": config.env.options.to_dict(),
        "sources": config.env.sources.to_dict(),
        "data_seed": config.env.data_seed,
        "max_turns": config.env.max_turns,
        "prompt": config.env.prompt,
        "max_new_tokens": config.rollout.max_new_tokens,
        "agents": config.agents.to_dict(),
    }
    return json.loads(json.dumps(found, default=str))
