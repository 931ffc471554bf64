"""A checkpoint as other tools read it:

    python -m flowjax.export --checkpoint=runs/<run>/checkpoints/<policy>/<step> --format=hf --out=<folder>

    hf      a Hugging Face model folder: all weights, the adapter merged in, with the tokenizer
    peft    the LoRA adapter alone, as PEFT and vLLM load it

The model and the adapter's shape are those of the run's config.json. `--dtype` is the precision of the merged weights,
that of the base model's config unless given. Exit status: 0 done, 2 something to correct in what was asked for.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags

from flowjax.config import ConfigError
from flowjax.models.config import read_config
from flowjax.models.decoder import set_adapter
from flowjax.models.hf import load_decoder, save_decoder
from flowjax.models.lora import Lora, adapter_from_peft, peft_config, peft_tensors
from flowjax.models.shape import ModelError
from flowjax.run import Policy, read_run
from flowjax.weights.hand_over import decoder_of, new_folder, write_peft_folder
from flowjax.weights.publish import CheckpointError, committed_steps, read_adapter

FORMATS = ("hf", "peft")
DTYPES = ("float32", "bfloat16", "float16")


def export(checkpoint: Path, out: Path, *, form: str, dtype: str = "") -> None:
    """Write `out` from a committed checkpoint of a run; the folder appears once it is complete.

    Raises:
        ConfigError: an unknown format or dtype, a checkpoint or run that is not there, a folder that is.
        CheckpointError, ModelError: the checkpoint cannot be read or does not fit the run's model.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format={form} is not known: use one of {', '.join(FORMATS)}")
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"--dtype={dtype} is not known: use one of {', '.join(DTYPES)}")
    if out.exists():
        raise ConfigError(f"--out={out} exists already: name a new folder")
    policy, step = _policy_of(checkpoint)
    arrays = read_adapter(checkpoint.parent, step)
    if form == "peft":
        _write_peft(policy, arrays, out)
        return
    base, precision = Path(policy.base.model.path), jnp.dtype(dtype or policy.base.model.dtype)
    with new_folder(out.absolute()) as unfinished:
        if policy.train == "full":
            decoder = decoder_of(read_config(base), arrays)
        else:
            lora = Lora(**policy.lora.to_dict())
            decoder = load_decoder(base, lora=lora, dtype=precision)
            # Through PEFT's layout and back: that is where every shape and name is checked.
            set_adapter(decoder, adapter_from_peft(peft_tensors(arrays, decoder.config, lora), decoder.config, lora))
        save_decoder(decoder, unfinished, dtype=precision, tokenizer=base)


def _policy_of(checkpoint: Path) -> tuple[Policy, int]:
    """The policy of a checkpoint, and its step."""
    steps = committed_steps(checkpoint.parent) if checkpoint.parent.is_dir() else []
    if not checkpoint.name.isdigit() or int(checkpoint.name) not in steps:
        there = f"{checkpoint.parent} has committed steps {steps}" if steps else f"{checkpoint.parent} has none"
        raise ConfigError(f"--checkpoint={checkpoint} is not a committed checkpoint: {there}")
    policies = read_run(checkpoint.absolute().parent.parent.parent).policies
    name = checkpoint.absolute().parent.name
    if name not in policies:
        raise ConfigError(f"--checkpoint={checkpoint} is of {name!r}, but the run has {', '.join(policies)}")
    return policies[name], int(checkpoint.name)


def _write_peft(policy: Policy, arrays: dict, out: Path) -> None:
    if policy.train == "full":
        raise ConfigError("--format=peft is for adapters, but the run has config.policy.train 'full': use --format=hf")
    base = policy.base.model.path
    model, lora = read_config(Path(base)), Lora(**policy.lora.to_dict())
    tensors = peft_tensors(arrays, model, lora)
    adapter_from_peft(tensors, model, lora)  # for its checks
    write_peft_folder(out.absolute(), tensors, peft_config(lora, base))


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
    print(f"{values.out}: {values['format'].value} of {values.checkpoint}")
    return 0


def _define() -> None:
    flags.DEFINE_string("checkpoint", "", "Folder of a committed checkpoint.")
    flags.DEFINE_string("out", "", "Folder to write; it must not exist.")
    flags.DEFINE_string("format", "hf", "hf | peft")
    flags.DEFINE_string("dtype", "", "Precision of merged weights: float32 | bfloat16 | float16.")


if __name__ == "__main__":
    _define()
    app.run(main)
