"""A checkpoint as other tools read it:

    python -m flowjax.export --checkpoint=runs/<run>/checkpoints/<policy>/<step> --format=hf --out=<folder>

    hf      a Hugging Face model folder: all weights, the adapter merged in, with the tokenizer
    peft    the LoRA adapter alone, as PEFT and vLLM load it

Both have a model card, README.md: data, algorithm, budget, the newest evaluation of the checkpoint, and where it comes
from. The model and the adapter's shape are those of the run's config.json. `--dtype` is the precision of the merged
weights, that of the base model's config unless given. Exit status: 0 done, 2 something to correct in the command.
"""

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import ConfigDict

from flowjax.config import ConfigError, asks_help
from flowjax.envs.demonstrations import no_shares_of
from flowjax.files import new_folder
from flowjax.launch.checks import other_bases
from flowjax.launch.command_line import committed_checkpoint
from flowjax.models.config import read_config
from flowjax.models.decoder import set_adapter
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.lora import Lora, adapter_from_peft, peft_tensors
from flowjax.models.params import DENSE
from flowjax.models.shape import ModelError
from flowjax.monitor.held_out import oldest_first, read_held_out, rows, summarise
from flowjax.monitor.metrics import read_metrics
from flowjax.monitor.provenance import read_starts
from flowjax.monitor.trouble import explain
from flowjax.records import most_turns
from flowjax.run import Policy, Run, played_in, read_models, read_run
from flowjax.weights.hand_over import decoder_of, peft_config, write_peft_folder
from flowjax.weights.publish import HANDED_OVER, CheckpointError, has_arrays, read_adapter

FORMATS = ("hf", "peft")
DTYPES = ("float32", "bfloat16", "float16")
_UNCUT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # settings of `config.eval` at which any token may be sampled


def export(checkpoint: Path, out: Path, *, form: str, dtype: str = "") -> None:
    """Write `out` from a committed checkpoint of a run; the folder appears once it is complete.

    Raises:
        ConfigError: an unknown format or dtype, a checkpoint or run that does not exist, an `out` that does, or an
            adapter that PEFT would not apply in full.
        CheckpointError, ModelError: the checkpoint cannot be read, has numbers that are not finite, or does not fit the
            run's model.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format={form} is not known: use one of {', '.join(FORMATS)}")
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"--dtype={dtype} is not known: use one of {', '.join(DTYPES)}")
    if dtype and form == "peft":
        raise ConfigError(f"--dtype={dtype} is for --format=hf: an adapter keeps the precision in which it was trained")
    if out.exists():
        raise ConfigError(f"--out={out} exists already: name a new folder")
    run, policy, step = _policy_of(checkpoint)
    _check_places(run, policy, out)
    if problems := other_bases(run, {policy.name: checkpoint.absolute().parent}):
        raise ConfigError("\n".join(problems))
    arrays = read_adapter(checkpoint.parent, step) if has_arrays(checkpoint.parent, step) else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if not jnp.isfinite(leaf).all():
            where = jax.tree_util.keystr(path)
            raise CheckpointError(f"{checkpoint} has numbers that are not finite in {where}: export an earlier one")
    card = model_card(run, policy, step, form)
    if form == "peft":
        _write_peft(policy, arrays, out, _base_of(run, policy), card)
        return
    base, precision = Path(policy.base.model.path), jnp.dtype(dtype or policy.base.model.dtype)
    with new_folder(out.absolute()) as unfinished:
        if arrays is None:  # a version between two checkpoints: what engines were given
            decoder = load_decoder(checkpoint / HANDED_OVER, dtype=precision)
        elif policy.train == "full":
            decoder = decoder_of(read_config(base), arrays)
        else:
            lora = Lora(**policy.lora.to_dict())
            decoder = load_decoder(base, lora=lora, dtype=precision)
            # By way of PEFT's layout and back, where every name and shape is checked.
            set_adapter(decoder, adapter_from_peft(peft_tensors(arrays, decoder.config, lora), decoder.config, lora))
        save_decoder(decoder, unfinished, dtype=precision, tokenizer=base)
        (unfinished / "README.md").write_text(card)


def _policy_of(checkpoint: Path) -> tuple[Run, Policy, int]:
    """The run of a checkpoint, its policy and its step."""
    folder, name, step = committed_checkpoint(checkpoint)
    run = read_run(folder)
    if name not in run.policies:
        raise ConfigError(f"--checkpoint={checkpoint} is of {name!r}, but the run has {', '.join(run.policies)}")
    return run, run.policies[name], step


def _check_places(run: Run, policy: Policy, out: Path) -> None:
    """Check that the base model is here, and that `out` is not where commands and trainers look for versions.

    Raises:
        ConfigError: it is not, or `out` is.
    """
    base = Path(policy.base.model.path)
    if not base.is_dir():
        started = [start["folder"] for start in read_starts(run.folder) if "folder" in start][-1:]
        there = "".join(f" ({folder})" for folder in started) if not base.is_absolute() else ""
        raise ConfigError(
            f"the run's base model is {str(base)!r}, and there is no such folder here: put the model there, or start "
            f"this command from the folder in which the run was started{there}"
        )
    versions = (run.folder / "checkpoints").resolve()
    if versions in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"--out={out} is among the run's checkpoints: name a folder elsewhere")


def _write_peft(policy: Policy, arrays: dict | None, out: Path, named: str, card: str) -> None:
    if policy.train == "full" or arrays is None:
        raise ConfigError("--format=peft is for adapters, but the run has config.policy.train 'full': use --format=hf")
    model, lora = read_config(Path(policy.base.model.path)), Lora(**policy.lora.to_dict())
    if model.experts is not None and model.dense_layers and (lost := [name for name in lora.targets if name in DENSE]):
        raise ConfigError(
            "--format=peft: the model has layers with experts and layers without, of which "
            f"PEFT would drop the adapters of {', '.join(lost)}: use --format=hf"
        )
    tensors = peft_tensors(arrays, model, lora)
    adapter_from_peft(tensors, model, lora)  # for its checks
    write_peft_folder(out.absolute(), tensors, peft_config(lora, named), card=card)


# ------------------------------------------------------------------------------------------------------- the model card


def model_card(run: Run, policy: Policy, step: int, form: str) -> str:
    """README.md of an exported checkpoint: Hugging Face's metadata, then data, algorithm, budget, results and
    provenance, as far as the run's folder has them."""
    base = _base_of(run, policy)
    metadata = {
        "base_model": base,
        "library_name": "peft" if form == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flowjax", "reinforcement-learning", *(["lora"] if policy.train == "lora" else [])],
    }
    header = [f"{name}: {json.dumps(value)}" for name, value in metadata.items()]  # JSON is YAML
    made = f"a LoRA adapter of rank {policy.lora.rank}" if policy.train == "lora" else "all weights"
    merged = ", merged into it" if policy.train == "lora" and form == "hf" else ""
    text = f"Policy `{policy.name}` of the run `{run.folder.name}` after {step} steps: {made} of `{base}`{merged}, "
    text += "trained with reinforcement learning by flowjax."
    trained = _trained_lines(run, policy, step)
    parts = {"Data": _data(run), "Algorithm": _algorithm(run, policy), "Budget": _budget(run, policy, step, trained)}
    parts |= {"Results": _results(run, policy, step), "Provenance": _provenance(run, trained)}
    lines = ["---", *header, "---", "", f"# {run.folder.name}, {policy.name} at step {step}", "", text]
    for title, facts in parts.items():
        lines += ["", f"## {title}", "", *(f"- {name}: {value}" for name, value in facts.items())]
    return "\n".join(lines) + "\n"


def _base_of(run: Run, policy: Policy) -> str:
    """The base model as the config names it, by its id if it was fetched: its path is then a folder of a cache."""
    return read_models(run.folder).get(policy.base.name, {}).get("path") or str(policy.base.model.path)


def _data(run: Run) -> dict[str, Any]:
    env = run.config.env
    found: dict[str, Any] = {"world": f"`{env.name}`", "options": f"`{json.dumps(env.options.to_dict(), default=str)}`"}
    if env.sources:
        found["sources"] = f"`{json.dumps(env.sources.to_dict(), default=str)}`"
    else:
        found["training tasks"] = f"up to {env.train_tasks:,}, data seed {env.data_seed}"
    return {**found, "turns of an episode": f"{most_turns(run)} at most", "workflow": f"`{run.config.workflow}`"}


def _algorithm(run: Run, policy: Policy) -> dict[str, Any]:
    def named(name: str, options: ConfigDict) -> str:
        return f"{name}, `{json.dumps(options.to_dict(), default=str)}`" if options else name

    optimizer = policy.optimizer
    return {
        "reward": f"`{json.dumps(policy.reward.components.to_dict(), default=str)}`",
        "credit": named(policy.credit.name, policy.credit.options),
        "objective": f"{named(policy.loss.kind, policy.loss.options)}; KL {policy.loss.kl_coefficient:g}, "
        f"entropy {policy.loss.entropy_coefficient:g}",
        "optimiser": f"{optimizer.name}, learning rate {optimizer.learning_rate:g} ({optimizer.schedule})",
        "staleness": f"{run.config.dataflow.max_staleness} versions at most",
        "seed": run.config.seed,
    }


def _trained_lines(run: Run, policy: Policy, step: int) -> list[dict[str, Any]]:
    """The policy's lines of training in the metrics up to a step."""
    return [
        line
        for line in read_metrics(run.folder)
        if line.get("kind") == "train"
        and line.get("policy", policy.name) == policy.name
        and line.get("step", 0) <= step
    ]


def _budget(run: Run, policy: Policy, step: int, trained: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(line.get(name, 0) for line in trained) for name in ("episodes", "trained_tokens", "total_s")}
    return {
        "steps": f"{step}, each of {policy.trainer.groups_per_step} groups of {run.config.rollout.group_size} episodes",
        "trajectories trained on": f"{sums['episodes']:,}",
        "sampled tokens trained on": f"{sums['trained_tokens']:,.0f}",
        "time of the steps": f"{sums['total_s']:,.0f} s",
    }


def _results(run: Run, policy: Policy, step: int) -> dict[str, Any]:
    """The newest evaluation of this version: by the command, or else the one beside training."""
    name, expected = f"{policy.name}@{step}", played_in(run)  # other tasks or players are another evaluation
    found: list[tuple[float, dict[str, Any]]] = []
    for path in (run.folder / "evaluations").glob("*/results.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            results = json.loads(path.read_text())
            played = results.get("played", {})
            if (
                name in played.get("name", "").split(",")
                and {"samples", "temperature"} <= played.keys()
                and all(played.get(key, of) == of for key, of in expected.items())
            ):
                found.append((path.stat().st_mtime, results))
    if found:
        results = max(found, key=lambda each: each[0])[1]
        played = results["played"]
        how = f"{played['samples']} samples of each task, temperature {played['temperature']:g}"
        cut = {name: played[name] for name, none in _UNCUT.items() if played.get(name, none) != none}
        how += "".join(f", {name} {value:g}" for name, value in cut.items())
        return {**dict(rows(results)), "played with": how + _together(played["name"], name)}
    # Files of evaluations by several policies are named by the versions of all.
    beside = [path for path in (run.folder / "held_out").glob("*.jsonl") if name in path.stem.split(",")]
    for newest in reversed(oldest_first(beside)):
        with contextlib.suppress(ConfigError):  # no episode ended in it, or the file is damaged
            results = summarise(read_held_out(newest), no_shares_of(run.folder))
            return {**dict(rows(results)), "played": f"beside training{_together(newest.stem, name)}"}
    return {"held-out tasks": "not evaluated at this step"}


def _together(played: str, name: str) -> str:
    """The names of all versions that played, where `name` did not play alone."""
    return "" if played == name else f", by {played}"


def _provenance(run: Run, trained: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The start that made the step: the last that began before the step's line was written. Later ones went on."""
    starts = read_starts(run.folder)
    if not starts:
        return {"run.json": "is not there: command and code are not known"}
    made_s = max((line.get("time_s", 0.0) for line in trained), default=math.inf)
    starts = [start for start in starts if start.get("started_s", 0.0) <= made_s] or starts
    start = starts[-1]
    code, machine = start.get("code", {}), start.get("machine", {})
    dirty = f", with changes in {len(code.get('changed_files', []))} files" if code.get("dirty") else ""
    gpus = ", ".join(machine.get("gpus", [])) or "no GPU"
    return {
        "command": f"`{shlex.join(start.get('command', []))}`",
        "starts": len(starts),
        "code": f"flowjax {code.get('version', '')}, commit {code.get('commit') or 'unknown'}{dirty}",
        "packages": ", ".join(f"{name} {version}" for name, version in start.get("versions", {}).items()),
        "machine": f"{machine.get('cpus', '?')} x {machine.get('cpu', 'CPU')}, {gpus}",
    }


def main(argv: Sequence[str]) -> int:
    del argv
    values = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")
    try:
        for name in ("checkpoint", "out"):
            if not values[name].value:
                raise ConfigError(f"--{name} is missing")
        export(Path(values.checkpoint), Path(values.out), form=str(values["format"].value), dtype=values.dtype)
    except (CheckpointError, ConfigError, ModelError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        remedy = explain(error) or f"--out={values.out} has to be a folder that can be made, all else one to be read"
        print(f"export: {error}: {remedy}", file=sys.stderr)
        return 2
    print(f"{values.out}: {values['format'].value} of {values.checkpoint}")
    return 0


def _define() -> None:
    flags.DEFINE_string("checkpoint", "", "Folder of a committed checkpoint.")
    flags.DEFINE_string("out", "", "Folder to write; it must not exist.")
    flags.DEFINE_string("format", "hf", "hf | peft")
    flags.DEFINE_string("dtype", "", "Precision of merged weights: float32 | bfloat16 | float16.")


if __name__ == "__main__":
    if not asks_help(sys.argv, __doc__):
        _define()
        app.run(main)
