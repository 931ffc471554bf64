"""Play the held-out tasks:

    python -m flowjax.evaluate runs/<name>                                 # its newest checkpoint, with its own config
    python -m flowjax.evaluate runs/<name> --steps=59,60                   # of these steps, where kept, or --steps=all
    python -m flowjax.evaluate runs/<name> --base                          # the base model as it is
    python -m flowjax.evaluate --config=<recipe> --checkpoint=runs/<name>/checkpoints/<policy>/<step>
    python -m flowjax.evaluate --config=<recipe> --model=<Hugging Face folder>
    python -m flowjax.evaluate --config=<recipe> --endpoint=https://host/v1 --model_name=<its name there>

`config.eval.tasks` held-out tasks (all there are, where those are fewer) are played `config.eval.samples` times each.
`results.json`, `results.md`, `run.json` (command, code, packages and machine of each start) and every episode are kept
in `<run>/evaluations/<step>`, or in `--out` where there is no run (docs/evaluation.md). The same command again plays
what is missing, and nothing that is there. Replies are seeded (`config.eval.seed`), or the likeliest each time with
`--config.eval.temperature=0`.

Several run folders are evaluated one after the other. Of several policies `--checkpoint` names one each, with commas
between them; `--config.agents` may bind agents otherwise than in the run, such as to "base" as a fixed partner.

An endpoint is any that speaks OpenAI's chat completions. `--api_key_env` names the environment variable that holds its
key, `--price_prompt` and `--price_sampled` are what a million tokens cost, `--endpoint_body` are further fields of each
request as JSON (null leaves one out that it would refuse, such as seed).

Exit status: 0 done, 1 what answers is away or a role failed for good, 2 something to correct in what was asked for.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowjax.canvas.backends import Backend, BackendError, Completion, Prices, Request
from flowjax.canvas.backends.config import BackendConfigError, open_backends
from flowjax.config import BASE_NAME, ConfigError, asks_help, is_unbegun, load_run, save_run, task_options
from flowjax.dataflow.evaluations import keep_evaluation
from flowjax.dataflow.tasks import episode_seed, held_out_tasks, task_at
from flowjax.envs import ENGINES_VARIABLE, RUN_VARIABLE, WorldError, find_world, naming_options_of
from flowjax.envs.demonstrations import no_shares_of
from flowjax.envs.pool import EnvPool
from flowjax.files import replace_file
from flowjax.launch import command_line
from flowjax.launch.checks import check_config, check_unchanged
from flowjax.launch.command_line import committed_checkpoint
from flowjax.launch.devices import Devices, engine_accelerators, mesh_count, share_out, visible_accelerators
from flowjax.launch.machine import RunInUse, fetch_models, hold, to_fetch
from flowjax.launch.preflight import examine
from flowjax.launch.roles import choose_ports, drop_copies, engine_roles, int8_roles, publish_endpoints
from flowjax.launch.session import OK, ROLE_FAILED, RunConsole, RunSession
from flowjax.launch.supervisor import USER_MISTAKE, Supervisor
from flowjax.models.shape import ModelError
from flowjax.monitor.held_out import markdown, rows, summarise
from flowjax.monitor.metrics import Progress
from flowjax.monitor.provenance import module_files, recorded_start
from flowjax.monitor.trouble import explain
from flowjax.records import Episode, Lease
from flowjax.rewards import Components
from flowjax.rollout.client import EngineError
from flowjax.rollout.engines import bases_of_run
from flowjax.rollout.episode import EpisodeFile, EpisodePlayer, EvaluationStopped, play_missing
from flowjax.rollout.sidecar import largest_code
from flowjax.run import Run, played_in, policy_sections, read_endpoints, read_models, resolve, write_models
from flowjax.weights.follow import WeightsError
from flowjax.weights.hand_over import link_version
from flowjax.weights.publish import CheckpointError, committed_steps, has_arrays, read_adapter
from flowjax.workflows.codec import CodecError

_MUST_AGREE = ("model.path", "policy", "workflow", "env.name", "env.options")  # in the command and the checkpoint's run
_WHAT = "give a run folder, or --config with one of --checkpoint, --model and --endpoint"
_PLAYED = "evaluation.json"  # in the folder of an evaluation: the model or checkpoints that play
_NOT_SENT = {"eval.top_k": 0, "eval.min_p": 0.0, "rollout.stop": []}  # settings no endpoint gets -> value for "none"
_IS_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*").fullmatch  # package.module:name
_SAY_EVERY_S = 30.0
_HEALTHY_EVERY_S = 0.2


@dataclass(frozen=True)
class Evaluation:
    """One model or set of checkpoints to be evaluated, in a folder of its own.

    name: of its file in `held_out/`.
    run: the evaluation's config and folder, in the form of a run.
    checkpoints: folders by policy; empty where a base model or an endpoint plays.
    played: description of the model or checkpoints that play, kept with the results.
    trained_in: folder of the run that the command names or whose checkpoints play; None if there is none.
    models: base models that were fetched by their ids (`flowjax.run.write_models`).
    """

    name: str
    run: Run
    checkpoints: Mapping[str, Path]
    played: Mapping[str, Any]
    trained_in: Path | None
    models: Mapping[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationRequest:
    """Evaluations that one set of engines, or one endpoint, can play.

    `endpoint` is the endpoint's backend config, empty for engines; `out` and `model` are the command's flags.
    """

    evaluations: Sequence[Evaluation]
    endpoint: Mapping[str, Any]
    prices: Prices
    out: str
    model: str

    def named(self, text: str) -> str:
        """A message with the base model's field named as the command has it: --model."""
        return text.replace("config.model.path", "--model") if self.model else text


def read_requests(argv: Sequence[str]) -> list[EvaluationRequest]:
    """Read the command line: a request for each run folder, or a single one without a folder.

    Raises:
        ConfigError: a mistake in it, or a folder that is no run or no committed checkpoint.
        CheckpointError: a checkpoint is there but cannot be read.
    """
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    rest = argv[len(folders) :]
    requests = [_read_request(rest, Path(folder)) for folder in folders] or [_read_request(rest, None)]
    count = sum(len(request.evaluations) for request in requests)
    if (out := requests[0].out) and count > 1:  # episodes have the same names in each: they would overwrite each other
        raise ConfigError(f"--out={out} is one folder, but there are {count} evaluations: leave it out")
    return requests


def _read_request(argv: Sequence[str], folder: Path | None) -> EvaluationRequest:
    def saved(_: flags.FlagValues) -> ConfigDict:
        if folder is None:
            raise ConfigError(f"--config is missing: {_WHAT}")
        return load_run(folder)

    config, values = command_line.parse(argv, _define, fallback=saved)
    given: dict[str, Any] = {name: values[name].value for name in _FLAGS}
    _check_sources(given, folder)
    if not config.eval.tasks:
        raise ConfigError("config.eval.tasks is 0: say how many held-out tasks to play")
    config = ConfigDict(config.to_dict())
    config.eval.seed = max(config.eval.seed, 0)
    config.update({"elsewhere": (), "dataflow": {"url": ""}})  # all engines and workers of an evaluation start here
    # A run's own config may be changed by the command: other levels of the world, say, or problems of another file.
    besides = ("env.options", *(("model.path", "policy") if given["endpoint"] or given["model"] else ()))
    if folder is not None and (
        conflicts := list(_conflicts(load_run(folder), config, list(config.policies), besides=besides))
    ):
        raise ConfigError("\n".join(conflicts))
    if given["endpoint"] or given["model"]:
        evaluations = [_of_model(config, folder, given)]
    else:
        evaluations = _of_checkpoints(config, folder, given)
    endpoint = _endpoint(given, config) if given["endpoint"] else {}
    prices = Prices(float(given["price_prompt"]), float(given["price_sampled"]))
    return EvaluationRequest(evaluations, endpoint, prices, given["out"], given["model"])


def _check_sources(given: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse a command that names no model to play, or more than one source of it."""
    named = [name for name in ("checkpoint", "model", "endpoint") if given[name]]
    if given["base"] and not given["checkpoint"]:
        named.append("base")
    if len(named) > 1:
        raise ConfigError(f"--{' and --'.join(named)} are given: {_WHAT}")
    if folder is None and named in ([], ["base"]):
        raise ConfigError(f"it is not said what is to be evaluated: {_WHAT}")
    if folder is not None and given["checkpoint"]:
        raise ConfigError(f"--checkpoint={given['checkpoint']} is given besides the run folder {folder}: {_WHAT}")
    if given["steps"] and (folder is None or named):
        raise ConfigError(f"--steps={given['steps']} is for checkpoints of a run folder: give that and no other source")
    if given["model_name"] and not given["endpoint"]:
        raise ConfigError(f"--model_name={given['model_name']} is for an endpoint: give --endpoint, or leave it out")
    for name in ("price_prompt", "price_sampled"):
        if not 0.0 <= given[name] < math.inf:  # also False for nan
            raise ConfigError(f"--{name}={given[name]} is no price: give what a million tokens cost, from 0 on")


_FLAGS = {
    "checkpoint": ("", "Folder of a committed checkpoint; of several policies one each."),
    "steps": ("", "Checkpoints of the run folder: steps with commas between them, or all."),
    "base": (False, "Play with the base model in place of a checkpoint."),
    "model": ("", "Hugging Face folder of a model to play."),
    "endpoint": ("", "Address of an OpenAI-style endpoint, up to /v1."),
    "model_name": ("", "The model's name at the endpoint."),
    "api_key_env": ("", "Environment variable that holds the endpoint's key."),
    "endpoint_body": ("{}", "Further fields of each request, as JSON."),
    "price_prompt": (0.0, "Of a million tokens read."),
    "price_sampled": (0.0, "Of a million tokens sampled."),
    "out": ("", "Folder of the evaluation, where there is no run."),
}


def _define(values: flags.FlagValues) -> None:
    define = {bool: flags.DEFINE_bool, float: flags.DEFINE_float, str: flags.DEFINE_string}
    for name, (default, text) in _FLAGS.items():
        define[type(default)](name, default, text, flag_values=values)


def _endpoint(given: Mapping[str, Any], config: ConfigDict) -> dict[str, Any]:
    """Options of the endpoint's backend, by the names of `flowjax.canvas.backends.config`."""
    if not given["model_name"]:
        raise ConfigError("--model_name is missing: give the model's name at the endpoint")
    try:
        body = json.loads(given["endpoint_body"])
    except ValueError as error:
        raise ConfigError(f"--endpoint_body={given['endpoint_body']} is no JSON ({error}): give an object") from error
    if not isinstance(body, dict):
        raise ConfigError(f"--endpoint_body={given['endpoint_body']} is no JSON object: give one such as {{}}")
    for name, none in _NOT_SENT.items():
        if (value := _plain(_at(config, name))) != none and (asked := name.partition(".")[2]) not in body:
            added = json.dumps({**body, asked: value})
            raise ConfigError(f"config.{name} is {value}, which is sent to no endpoint: give --endpoint_body='{added}'")
    options: dict[str, Any] = {"kind": "openai", "base_url": given["endpoint"], "model": given["model_name"]}
    return {**options, "extra_body": body, "api_key_env": given["api_key_env"] or None}


def _of_model(config: ConfigDict, folder: Path | None, given: Mapping[str, Any]) -> Evaluation:
    """The evaluation of a Hugging Face folder, or of an endpoint."""
    if given["endpoint"]:
        played = {"name": given["model_name"], "endpoint": given["endpoint"], "request": given["endpoint_body"]}
        return _evaluation(config, folder, given["out"], {}, played)
    model = Path(given["model"])
    config.model.path, config.model.nano = str(model), None
    _play_bases(config)
    name = (model if model.name.strip(".") else model.resolve()).name  # "." has a name only when resolved
    return _evaluation(config, folder, given["out"], {}, {"name": name, "model": str(model)})


def _of_checkpoints(config: ConfigDict, folder: Path | None, given: Mapping[str, Any]) -> list[Evaluation]:
    """The evaluations of a run's checkpoints, or of its base model, for which the run needs no checkpoint."""
    policies = list(config.policies) or [config.policy.name]
    if folder is None:
        checkpoints = [_named(given["checkpoint"], config)]
        runs: dict[Path, list[str]] = {}
        for policy, checkpoint in checkpoints[0].items():
            runs.setdefault(checkpoint.parents[2], []).append(policy)  # <run>/checkpoints/<policy>/<step>
        known = {run: load_run(run) for run in runs if (run / "config.json").exists()}
        if conflicts := [text for run in known for text in _conflicts(known[run], config, policies=runs[run])]:
            raise ConfigError("\n".join(dict.fromkeys(conflicts)))
        folder = next(iter(runs))
    elif given["base"]:
        checkpoints = []
    else:
        checkpoints = _of_steps(folder / "checkpoints", policies, given["steps"])
    if given["base"]:
        _play_bases(config)
        played = {"name": BASE_NAME, "model": config.model.path}
        return [_evaluation(config, folder, given["out"], {}, played)]
    found, speaking = [], set(resolve(config).agents.values())
    for each in checkpoints:
        if not speaking & set(each):
            fault = f"config.agents is {config.agents.to_dict()}, with no agent for {' or '.join(each)}"
            raise ConfigError(f"{fault}, whose checkpoint is to play: give it one, or evaluate the base model (--base)")
        for checkpoint in each.values():
            if has_arrays(checkpoint.parent, int(checkpoint.name)):  # else engines read the published files as they are
                read_adapter(checkpoint.parent, int(checkpoint.name))
        # What is filed under a policy's name is what it played.
        steps = {policy: int(checkpoint.name) for policy, checkpoint in each.items() if policy in speaking}
        of_one = ConfigDict(config.to_dict())
        of_one.eval.versions = tuple(sorted(set(steps.values())))
        name = ",".join(f"{policy}@{step}" for policy, step in steps.items())
        played = {"name": name, "checkpoints": {policy: str(path.absolute()) for policy, path in each.items()}}
        short = next(iter(each.values())).name if len(each) == 1 else name
        found.append(_evaluation(of_one, folder, given["out"], each, played, called=short))
    return found


def _named(given: str, config: ConfigDict) -> dict[str, Path]:
    """The checkpoints that a command names, by policy."""
    checkpoints: dict[str, Path] = {}
    for checkpoint in map(Path, given.split(",")):
        _, policy, step = committed_checkpoint(checkpoint)
        if policy in checkpoints:
            raise ConfigError(
                f"--checkpoint names {policy} twice: for several checkpoints of a policy give its run folder and "
                f"--steps={checkpoints[policy].name},{step}"
            )
        checkpoints[policy] = checkpoint.absolute().with_name(str(step))
    if not config.policies and len(checkpoints) == 1:
        config.policy.name = next(iter(checkpoints))
    expected = list(resolve(config).policies)
    if set(checkpoints) != set(expected):
        raise ConfigError(
            f"--checkpoint names {', '.join(checkpoints)}, but the config has {', '.join(expected)}: give one "
            "checkpoint of each policy, with commas between them"
        )
    return checkpoints


def _of_steps(folder: Path, policies: Sequence[str], asked: str) -> list[dict[str, Path]]:
    """The checkpoints of these steps, or the newest of each policy; in the order of the steps."""
    there = {policy: committed_steps(folder / policy) for policy in policies}
    if lacking := [policy for policy, steps in there.items() if not steps]:
        raise ConfigError(f"{folder / lacking[0]} has no committed checkpoint: nothing can be evaluated yet but --base")
    if not asked:
        return [{policy: folder / policy / str(max(steps)) for policy, steps in there.items()}]
    if not (shared := sorted(set.intersection(*map(set, there.values())))):
        has = "; ".join(f"{policy} has {steps}" for policy, steps in there.items())
        raise ConfigError(
            f"--steps={asked}: the policies in {folder} have no step in common ({has}): leave it out for the newest of "
            "each, or name one of each with --config and --checkpoint"
        )
    steps = shared if asked == "all" else asked.split(",")
    for step in steps:
        if str(step) not in map(str, shared):
            raise ConfigError(
                f"--steps={asked}: step {step} is not in {folder}, which has {shared}: give some of these, or all"
            )
    return [{policy: folder / policy / str(step) for policy in policies} for step in sorted(set(map(int, steps)))]


def _play_bases(config: ConfigDict) -> None:
    """Have base models speak for all agents, in place of the policies that are trained on them."""
    run = resolve(config)
    bases = {name: policy.base.name for name, policy in run.policies.items()}
    config.agents = {agent: bases.get(model, model) for agent, model in run.agents.items()}
    config.eval.versions = (0,)  # nothing is trained
    # With "full" the engines expect weights that replace the base's: here they keep the base as it is.
    config.policy.train = "lora"
    for changes in config.policies.values():
        if "train" in changes.get("policy", {}):
            del changes.policy["train"]


def _evaluation(
    config: ConfigDict,
    run_dir: Path | None,
    out: str,
    checkpoints: Mapping[str, Path],
    played: dict[str, Any],
    *,
    called: str = "",
) -> Evaluation:
    """The evaluation in its folder: the one where an earlier start of the same evaluation was, or a fresh one."""
    config.eval.versions = config.eval.versions or (0,)
    name = re.sub(r"[^\w@,.=-]+", "-", called or played["name"])
    bases = resolve(config).bases
    if "endpoint" not in played:
        weights = [*checkpoints.values(), *(Path(base.model.path) for base in bases.values() if base.model.path)]
        played["changed_s"] = max(map(_changed_s, weights), default=0.0)
    rounded = {name: base for name, base in bases.items() if base.engine.quantize == "int8"}
    if rounded:  # on CPUs int8 has fewer codes: other weights, another evaluation
        played["largest_codes"] = {name: largest_code(base) for name, base in rounded.items()}
    if data := _named_data(config):
        played["data_changed_s"] = max(map(_changed_s, data))
    if code := _named_code(config):
        played["code"] = hashlib.blake2b(b"".join(file.read_bytes() for file in code), digest_size=8).hexdigest()
    if out:
        folder = Path(out)
        if not is_unbegun(folder) and not _same(folder, config, played):
            raise ConfigError(f"--out={out} holds another evaluation, or something else: name a new folder")
    else:
        parent = run_dir or Path(config.runs)
        name = name if run_dir else f"{config.name or 'run'}-{name}"
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        folders = (parent / "evaluations" / each for each in names)
        folder = next(each for each in folders if is_unbegun(each) or _same(each, config, played))
    if not is_unbegun(folder):
        before = load_run(folder).eval
        if _is_whole(folder) and before.tasks >= config.eval.tasks and before.samples >= config.eval.samples:
            config.eval.tasks, config.eval.samples = (
                before.tasks,
                before.samples,
            )  # its results say more than those asked
    kept = re.sub(r"[^\w@,.=-]+", "-", played["name"])
    models = read_models(run_dir) if run_dir else {}
    return Evaluation(kept, resolve(config, folder, models), checkpoints, played, run_dir, models)


def _same(folder: Path, config: ConfigDict, played: Mapping[str, Any]) -> bool:
    """True if the folder holds an earlier start of this evaluation, even with other numbers of tasks and samples."""
    try:
        saved, of = load_run(folder), json.loads((folder / _PLAYED).read_text())
    except (ConfigError, OSError, ValueError):
        return False
    saved = ConfigDict(saved.to_dict())
    # These two may differ: episodes that are there are kept, and missing ones are played. But more of one and fewer of
    # the other would take the place of results that are whole.
    more = (saved.eval.tasks > config.eval.tasks, saved.eval.samples > config.eval.samples)
    fewer = (saved.eval.tasks < config.eval.tasks, saved.eval.samples < config.eval.samples)
    if any(more) and any(fewer) and _is_whole(folder):
        return False
    saved.eval.tasks, saved.eval.samples = config.eval.tasks, config.eval.samples
    # These may differ where a run is resumed, but not here: other engines give other episodes.
    if saved.eval.seed != config.eval.seed or _precisions(saved) != _precisions(config):
        return False
    places: Mapping[str, str] = of.get("checkpoints", {})  # relative ones in evaluations made before
    of |= {"checkpoints": {policy: str(Path(place).absolute()) for policy, place in places.items()}} if places else {}
    return of == played and not check_unchanged(saved, config)


def _is_whole(folder: Path) -> bool:
    """True if the folder has the results of an evaluation in which every episode came to its end."""
    try:
        return json.loads((folder / "results.json").read_text())["unfinished"] == 0
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _precisions(config: ConfigDict) -> dict[str, tuple[str, str]]:
    """Serving precision and quantisation of each base model."""
    return {name: (base.engine.dtype, base.engine.quantize) for name, base in resolve(config).bases.items()}


def _named_data(config: ConfigDict) -> list[Path]:
    """Files that the world's options name, and folders of its tasks. Rows have no ids but their places in a file, so a
    file that has changed makes another evaluation."""
    # Of a text that is too long for a path, such as a prompt, `Path.exists` would raise an error.
    there = [(name, Path(text)) for name, text in _texts(config.env) if os.access(text, os.F_OK)]
    return sorted({path for name, path in there if name.endswith("path") or path.is_file()})


def _named_code(config: ConfigDict) -> list[Path]:
    """Files of modules outside flowjax that the config names: of a world and those that it derives from, of a workflow,
    operators and backends. Other code plays other episodes."""
    named = {text.partition(":")[0] for _, text in [("", config.workflow), *_texts(config.env)] if _IS_CODE(text)}
    named |= {kind.__module__ for kind in find_world(config.env.name).__mro__}
    return module_files(named)


def _texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text that is not empty in a section of the config, with the name of the field that it is in."""
    if isinstance(value, str) and value:
        yield name, value
    elif isinstance(value, ConfigDict | Mapping):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, name)


def _changed_s(place: Path) -> float:
    """Time of the latest change of a file, or of a folder's files, in seconds since the epoch."""
    paths = [place] if place.is_file() else place.rglob("*")
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)


def _conflicts(
    trained: ConfigDict, config: ConfigDict, policies: Sequence[str], *, besides: Sequence[str] = ()
) -> Iterator[str]:
    """Messages on fields of `_MUST_AGREE`, except `besides`, in which the command differs from the policies' run."""
    fields = [name for name in _MUST_AGREE if name not in besides]
    compared = [(f"config.{name}", _at(trained, name), _at(config, name)) for name in fields]
    runs = resolve(trained), resolve(config)
    compared += [
        (
            f"config.bases.{base}.model.path",
            *(run.bases[base].model.path if base in run.bases else None for run in runs),
        )
        for base in sorted({*trained.bases, *config.bases})
    ]
    compared += [
        (f"config.policies.{name}.policy", *(policy_sections(source, name)["policy"] for source in (trained, config)))
        for name in config.policies
        if name in runs[0].policies and name in policies
    ]
    for name, was, now in ((name, _plain(was), _plain(now)) for name, was, now in compared):
        if was != now:
            yield f"{name} is {now}, but the checkpoint was trained with {was}: give the run's own"


def _at(config: ConfigDict, field: str) -> object:
    node: object = config
    for name in field.split("."):
        assert isinstance(node, ConfigDict)
        node = node[name]
    return node


def _plain(value: object) -> object:
    """A value that can be compared with one from JSON: sections as dicts, tuples as lists."""
    if isinstance(value, ConfigDict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


# -------------------------------------------------------------------------------------------------------------- playing


def main(argv: Sequence[str]) -> int:
    if asks_help(argv, __doc__):
        return OK
    jax.config.update("jax_platforms", "cpu")  # needs no accelerator, and must not take the engines' memory
    console = RunConsole()
    try:
        requests = [_with_models(request) for request in read_requests(argv)]
        for request in requests:  # all are checked before the first is played, which may take hours
            if problems := _problems(request):
                print("\n".join(dict.fromkeys(problems)), file=sys.stderr)
                return USER_MISTAKE
        for request in requests:
            if status := _evaluate(request, console, [sys.executable, "-m", "flowjax.evaluate", *argv]):
                return status
    except (BackendConfigError, CheckpointError, CodecError, ConfigError, ModelError, RunInUse, WorldError) as error:
        text = str(error)
        print(f"config.{text}" if text.startswith("env.") else text, file=sys.stderr)  # worlds leave "config." out
        return USER_MISTAKE
    except OSError as error:  # a folder that cannot be made, or a disk that is full
        remedy = explain(error) or "name a folder of your own with --out"
        print(f"evaluate: {error}: {remedy}; what was played is kept, and the same command goes on", file=sys.stderr)
        return USER_MISTAKE
    return OK


def _with_models(request: EvaluationRequest) -> EvaluationRequest:
    """The request, after fetching base models that are named by their ids."""
    if request.endpoint or not to_fetch(request.evaluations[0].run):
        return request
    found = []
    for evaluation in request.evaluations:
        run = evaluation.run
        try:
            models = fetch_models(run, evaluation.trained_in or run.folder)
        except ConfigError as error:
            raise ConfigError(request.named(str(error))) from error
        found.append(replace(evaluation, run=resolve(run.config, run.folder, models), models=models))
    return replace(request, evaluations=found)


def _problems(request: EvaluationRequest) -> list[str]:
    """Problems of the config, and of this machine or the endpoint as they are now."""
    run = request.evaluations[0].run
    if all(_is_complete(evaluation) for evaluation in request.evaluations):
        return []
    if not request.endpoint:
        found = examine(run, _devices(run), checkpoints=_all_checkpoints(request.evaluations[0]))
        return [request.named(text) for text in (*found.problems, *found.here)]
    if problems := check_config(run.config):
        return problems
    world = find_world(run.config.env.name)
    for source in run.config.env.sources or ("",):
        with naming_options_of(source, run.config):
            world(**task_options(run.config, source)).env()
    return asyncio.run(_unanswered(request.endpoint))


def _all_checkpoints(evaluation: Evaluation) -> dict[str, Path]:
    """By policy, the folder of its checkpoints: of those that play, or those of the run whose base does."""
    if evaluation.checkpoints or evaluation.trained_in is None:
        return {policy: checkpoint.parent for policy, checkpoint in evaluation.checkpoints.items()}
    return {policy: evaluation.trained_in / "checkpoints" / policy for policy in evaluation.run.policies}


async def _unanswered(endpoint: Mapping[str, Any]) -> list[str]:
    """The endpoint's refusal of a first request: a key that is not known, say, or another model's name."""
    async with open_backends({"endpoint": endpoint}) as backends:
        try:
            await backends["endpoint"].complete(Request([{"role": "user", "content": "Say yes."}], max_new_tokens=16))
        except BackendError as error:
            return [f"--endpoint={endpoint['base_url']} does not answer: {error}"]
    return []


def _devices(run: Run) -> Devices:
    sizes = tuple(run.config.mesh.to_dict().values())
    return share_out(visible_accelerators(), engine_accelerators(run), mesh_count(sizes))


def leases_of(evaluation: Evaluation) -> list[Lease]:
    """The episodes of an evaluation, in order: each held-out task `eval.samples` times.

    Ids and seeds depend only on a task's index and the sample's: so the same command finds which are missing.
    """
    config = evaluation.run.config
    tasks = held_out_tasks(config)
    speaking = set(evaluation.run.agents.values())
    versions = {policy: int(path.name) for policy, path in evaluation.checkpoints.items() if policy in speaking}
    names = [f"eval-{index:06d}" for index in range(min(config.eval.tasks, len(tasks)))]
    return [
        Lease(
            lease_id=f"{name}-{sample:04d}",
            task=task,
            group_id=name,
            episode_id=f"{name}-{sample:04d}",
            # 0 and not config.seed: runs of all seeds, and evaluations during a run, play the same held-out episodes.
            seed=episode_seed(0, index, sample),
            kind="eval",
            temperature=config.eval.temperature,
            versions=versions,
        )
        for index, name in enumerate(names)
        for task in [task_at(tasks, index)]
        for sample in range(config.eval.samples)
    ]


def _file(evaluation: Evaluation) -> EpisodeFile:
    return EpisodeFile(evaluation.run.folder / "episodes.msgpack")


def _is_complete(evaluation: Evaluation) -> bool:
    return {lease.episode_id for lease in leases_of(evaluation)} <= _file(evaluation).read().keys()


def _evaluate(request: EvaluationRequest, console: Console, command: Sequence[str]) -> int:
    """Play the missing episodes of each evaluation, then write and print its results. Returns the exit status."""
    missing = [evaluation for evaluation in request.evaluations if not _is_complete(evaluation)]
    if missing and (status := _play_missing(missing, request, console, command)):
        return status
    for evaluation in request.evaluations:
        if all(evaluation is not each for each in missing):
            console.print(f"{evaluation.name}: nothing is left to play, its episodes are in {evaluation.run.folder}")
        results = write_results(evaluation, request.prices)
        console.print(_table(f"{evaluation.name}, {evaluation.run.folder}", results))
    return OK


def _play_missing(
    missing: Sequence[Evaluation], request: EvaluationRequest, console: Console, command: Sequence[str]
) -> int:
    """Play the missing episodes of some evaluations, with a lock on their folders. Returns the exit status."""
    folders = [evaluation.run.folder for evaluation in missing]
    python = "" if request.endpoint else missing[0].run.config.engine.python
    with contextlib.ExitStack() as held:
        for evaluation in missing:
            held.enter_context(hold(evaluation.run.folder, "evaluation"))
            begin(evaluation)
        start = held.enter_context(recorded_start(folders, command, engine_python=python))
        try:
            status = _play(missing, request, console)
        except (EngineError, EvaluationStopped, WeightsError) as error:
            print(f"evaluate: {error}; the same command goes on from here", file=sys.stderr)
            status = ROLE_FAILED
        start["exit_status"] = status
    return status


def begin(evaluation: Evaluation) -> None:
    """Make the folder: `evaluation.json`, the config, and the versions that play, which a trainer may delete meanwhile.

    Raises:
        CheckpointError: it has deleted one already.
    """
    folder = evaluation.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder, evaluation.models)
    replace_file(folder / _PLAYED, json.dumps(dict(evaluation.played), indent=2) + "\n")
    save_run(evaluation.run.config, folder)  # last: a folder without it is free (`is_unbegun`)
    for policy, checkpoint in evaluation.checkpoints.items():
        published = folder / "checkpoints" / policy / checkpoint.name
        if not published.exists():  # at the place where a run has its checkpoint and the follower looks
            link_version(checkpoint, published)


def _play(evaluations: Sequence[Evaluation], request: EvaluationRequest, console: Console) -> int:
    """Start the engines, play one evaluation after the other, and stop them."""
    run = evaluations[0].run
    session = RunSession(run.folder, steps={}, console=console)

    async def with_engines(supervisor: Supervisor, progress: Progress) -> None:
        for evaluation in evaluations:
            await _play_served(evaluation, read_endpoints(run.folder), session)

    async def with_endpoint(supervisor: Supervisor, progress: Progress) -> None:
        async with open_backends({"endpoint": request.endpoint}) as backends:
            for evaluation in evaluations:
                _tell_environments(evaluation.run.folder, {})
                async with _pool(evaluation.run) as pool:
                    counted = _CountedBackend(backends["endpoint"], _tokens_file(evaluation))
                    player = EpisodePlayer.of_run(evaluation.run, pool=pool, backend=counted)
                    await _play_with(evaluation, player, session)

    if request.endpoint:
        return asyncio.run(session.run(list, with_endpoint))
    devices, ports = _devices(run), choose_ports(run)
    publish_endpoints(run, ports)
    try:
        return asyncio.run(session.run(lambda: engine_roles(run, ports, devices), with_engines, first=int8_roles(run)))
    finally:
        drop_copies(run)


class _CountedBackend:
    """The endpoint, with the tokens of each reply written to a file at once.

    An attempt that fails leaves no episode that would have them, but has been paid for.
    """

    def __init__(self, backend: Backend, file: Path):
        self.identity = backend.identity
        self._backend, self._file = backend, file

    async def complete(self, request: Request) -> Completion:
        """See `Backend`."""
        completion = await self._backend.complete(request)
        with self._file.open("a") as file:
            file.write(f"{completion.usage.prompt_tokens} {completion.usage.sampled_tokens}\n")
        return completion


def _tokens_file(evaluation: Evaluation) -> Path:
    """File with a line for each reply of an endpoint, of all starts: tokens read, tokens sampled."""
    return evaluation.run.folder / "endpoint-tokens.txt"


async def _play_served(evaluation: Evaluation, endpoints: Mapping[str, str], session: RunSession) -> None:
    """Play an evaluation against engines, while followers bring its checkpoints to these."""
    run = evaluation.run
    urls = {name: [endpoints[engine.name] for engine in base.engines] for name, base in run.bases.items()}
    _tell_environments(run.folder, urls)
    async with bases_of_run(run, urls) as bases, _pool(run) as pool:
        for base in bases:
            while not await base.engine.healthy():
                await base.watch()
                await asyncio.sleep(_HEALTHY_EVERY_S)
        player = EpisodePlayer.of_run(run, pool=pool, bases=bases)
        # The followers run until cancelled: the first to end is the work, or a follower that has failed.
        work = asyncio.create_task(_play_with(evaluation, player, session))
        tasks = [work, *(asyncio.create_task(base.follower.run()) for base in bases)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _play_with(evaluation: Evaluation, player: EpisodePlayer, session: RunSession) -> None:
    config, said_s, said = evaluation.run.config, time.monotonic(), -1

    def report(done: int, of: int) -> None:
        nonlocal said_s, said
        if 10 * done // of > said or time.monotonic() - said_s > _SAY_EVERY_S:
            said_s, said = time.monotonic(), 10 * done // of
            session.screen.say(f"{evaluation.name}: {done} of {of} episodes")

    started = evaluation.run.bases.values() if player.backend is None else ()
    await play_missing(
        leases_of(evaluation),
        _file(evaluation),
        player.play,
        slots=config.rollout.max_concurrent_episodes,
        attempts=config.dataflow.max_attempts,
        # Long enough for the supervisor to restart an engine that died; an endpoint is not started by us.
        patience_s=max([config.engine.request_timeout_s, *(base.engine.start_timeout_s for base in started)]),
        report=report,
    )


def _pool(run: Run) -> EnvPool:
    """Worker processes that hold the environments."""
    return EnvPool(workers=run.config.env.workers, step_timeout_s=run.config.env.step_timeout_s)


def _tell_environments(run_dir: Path, urls: Mapping[str, Sequence[str]]) -> None:
    """Set the variables by which worlds find the run's folder and its engines: before workers start, which inherit."""
    os.environ[RUN_VARIABLE] = str(run_dir)
    os.environ[ENGINES_VARIABLE] = json.dumps(dict(urls))


# -------------------------------------------------------------------------------------------------------------- results


def write_results(evaluation: Evaluation, prices: Prices) -> dict[str, Any]:
    """Write `held_out/`, `results.json` and `results.md` from the episodes that were played. Returns the results.

    Raises:
        ConfigError: no episode has ended, or none had a turn since all prompts are too long.
    """
    run, episodes = evaluation.run, _file(evaluation).read()
    leases = leases_of(evaluation)
    played = [(lease.task, episodes[lease.episode_id]) for lease in leases if lease.episode_id in episodes]
    if not played:
        raise ConfigError(f"{run.folder}: no episode of this evaluation came to its end, see the lines above")
    limit = "the model's context" if "endpoint" in evaluation.played else "config.rollout.max_prompt_tokens"
    if not any(episode.turns for _, episode in played) and all(episode.status == "truncated" for _, episode in played):
        raise ConfigError(
            f"{run.folder}: no model was asked anything, since no first prompt of {len(played)} episodes fits {limit} "
            f"({played[0][1].error}): raise that, and evaluate again"
        )
    transcripts = run.config.eval.transcripts
    kept = keep_evaluation(run.folder, evaluation.name, played, rewards_of(run), transcripts=transcripts)
    results = summarise(kept.episodes, no_shares_of(run.folder))
    results |= {"asked": run.config.eval.tasks, "unfinished": len(leases) - len(played)}
    if lost := _tokens_lost(evaluation, episodes.values()):
        results["tokens"] = {kind: count + lost[kind] for kind, count in results["tokens"].items()}
        results["tokens_lost"] = lost
    if cost := prices.cost(results["tokens"]["prompt"], results["tokens"]["sampled"]):
        results["cost"] = cost
    settings = run.config.eval
    results["played"] = {
        **{name: value for name, value in evaluation.played.items() if not name.endswith("changed_s")},
        **played_in(run),
        "samples": settings.samples,
        **{name: settings[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    }
    replace_file(run.folder / "results.json", json.dumps(results, indent=2) + "\n")
    replace_file(run.folder / "results.md", markdown(results))
    return results


def _tokens_lost(evaluation: Evaluation, episodes: Iterable[Episode]) -> dict[str, int]:
    """Tokens of an endpoint's replies that are in no episode, by kind; {} where there are none."""
    if not (file := _tokens_file(evaluation)).exists():
        return {}
    lines = (line.split() for line in file.read_text().splitlines())
    replies = [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]  # a crash may have cut one short
    turns = [turn for episode in episodes for turn in episode.turns]
    lost = {
        "prompt": sum(prompt for prompt, _ in replies) - sum(len(turn.prompt_ids) for turn in turns),
        "sampled": sum(sampled for _, sampled in replies) - sum(len(turn.sampled_ids) for turn in turns),
    }
    # Below 0 with episodes that an older flowjax kept, which did not count replies: the loss is not known then.
    return {kind: max(count, 0) for kind, count in lost.items()} if max(lost.values()) > 0 else {}


def rewards_of(run: Run) -> dict[str, Components]:
    """Components of the reward of every model that speaks for an agent and has a reward.

    A base model that plays alone is rewarded as the policy whose place it takes. A base model beside other agents gets
    no reward here: it might be paid for something else than they.
    """
    alone = len(run.agents) == 1
    one = next(iter(run.policies.values())).reward if len(run.policies) == 1 else run.config.reward
    return {
        model: (run.policies[model].reward if model in run.policies else one).components.to_dict()
        for model in dict.fromkeys(run.agents.values())
        if model in run.policies or alone
    }


def _table(title: str, results: Mapping[str, Any]) -> Table:
    table = Table(title=Text(title, "table.title"), title_justify="left", show_header=False)
    for name, value in rows(results):
        table.add_row(Text(name), Text(value))  # `Text`: a name may contain what rich reads as markup
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
