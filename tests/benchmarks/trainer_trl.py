# pyright: reportMissingImports=false
"""TRL's GRPOTrainer with a PEFT adapter, for `tests.benchmarks.trainer`; runs in the peers' environment.

The second argument is the variant: eager or compiled (`torch_compile` of its arguments), and plain-eager or
plain-compiled, with the model's own head in place of TRL's chunked one; liger on a GPU (`use_liger_kernel`).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from tests.benchmarks.trainer_case import (
    CLIP,
    CLIP_NORM,
    LEARNING_RATE,
    Case,
    Trainer,
    make_rows,
    padded,
    read_case,
    serve,
)

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _trainer(case: Case, folder: Path, variant: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=getattr(torch, case.dtype), attn_implementation="sdpa", local_files_only=True
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=len(case.lengths),
        num_generations=len(case.lengths),
        max_completion_length=max(case.lengths),
        loss_type="bnpo",
        epsilon=CLIP,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        gradient_checkpointing=False,
        temperature=1.0,
        torch_compile=variant.endswith("compiled"),
        use_liger_kernel=variant == "liger",
        bf16=case.on_gpu,
        use_cpu=not case.on_gpu,
        report_to="none",
        max_steps=1000,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        # A fingerprint of its own: some versions of dill cannot hash what some of pyarrow hold.
        train_dataset=Dataset(
            InMemoryTable.from_pydict({"prompt": ["never rolled out"] * len(case.lengths)}), fingerprint="prompts"
        ),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        peft_config=LoraConfig(r=case.rank, lora_alpha=case.rank, lora_dropout=0.0, target_modules=_TARGETS),
    )


def _set_adapter(model: torch.nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Put the case's arrays in place of what PEFT drew; every LoRA parameter must be met."""
    left = set(arrays)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parts = path.split(".")
            if "lora_A" not in parts and "lora_B" not in parts:
                continue
            side = "a" if "lora_A" in parts else "b"
            target = next(part for part in parts if part in _TARGETS)
            name = f"{parts[parts.index('layers') + 1]}.{target}.{side}"
            parameter.copy_(torch.from_numpy(arrays[name].T.copy()))
            left.discard(name)
    if left:
        raise ValueError(f"the model has no LoRA parameter for {sorted(left)[:3]}")


def _plain_head(model: torch.nn.Module, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **__: Any):
    """Log-probabilities, entropies and no loss of routers, as `GRPOTrainer._get_per_token_logps_and_entropies`."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1).logits[:, :-1]
    with torch.no_grad():
        entropies = entropy_from_logits(logits)
    return selective_log_softmax(logits, input_ids[:, -logits_to_keep:]), entropies, None


def make(folder: Path) -> Trainer:
    case, arrays = read_case(folder)
    trainer = _trainer(case, folder, sys.argv[2])
    if sys.argv[2].startswith("plain"):
        trainer._get_per_token_logps_and_entropies = _plain_head
    _set_adapter(trainer.model, arrays)
    rows = {name: torch.from_numpy(array) for name, array in padded(make_rows(case)).items()}
    rows = {name: array.to(trainer.args.device) for name, array in rows.items()}
    inputs = {name: rows[name].long() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    inputs |= {"advantages": rows["advantages"], "old_per_token_logps": rows["behaviour"]}
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    trainer._prepare_inputs = lambda _: inputs  # its own would roll out
    trainer.create_optimizer_and_scheduler(num_training_steps=1000)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = model
    trainer.current_gradient_accumulation_steps = 1

    def step() -> tuple[float, float]:
        loss = trainer.training_step(model, inputs, None)
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return float(loss), float(norm)

    return Trainer(step, torch.cuda.max_memory_allocated) if case.on_gpu else Trainer(step)


if __name__ == "__main__":
    serve(make)
