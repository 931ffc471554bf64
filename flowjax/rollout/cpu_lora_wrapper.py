"""vLLM's LoRA operations for the CPU on top of `cpu_lora`'s grouped products. Imported inside vLLM only."""

import inspect
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from flowjax.rollout.cpu_lora import RowGroup, add_lora, expand, group_rows, shrink


class GroupedLora(PunicaWrapperCPU):
    """The rows of a step are grouped once, when vLLM announces which adapter each row has."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any):
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self.token_groups: list[RowGroup] = []
        self.sampler_groups: list[RowGroup] = []

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self.token_groups = group_rows(self.token_lora_indices)
        self.sampler_groups = group_rows(self.sampler_indices)

    def add_shrink(self, y, x, lora_a_stacked, scale, **kwargs) -> None:
        x = x.view(-1, x.shape[-1])
        for out, lora_a in zip(y, lora_a_stacked, strict=True):
            shrink(x, lora_a, self.token_groups, out.view(-1, out.shape[-1]), scale)

    def add_expand(self, y, x, lora_b_stacked, output_slices, offset_start=0, add_inputs=True, **kwargs) -> None:
        y = y.view(-1, y.shape[-1])
        start = offset_start
        for hidden, lora_b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            expand(hidden, lora_b, self.token_groups, y[:, start : start + width], add_inputs)
            start += width

    def add_lora_embedding(self, y, x, lora_b_stacked, add_inputs=True, **kwargs) -> None:
        expand(x, lora_b_stacked, self.token_groups, y, add_inputs)

    def add_lora_linear(
        self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs
    ) -> None:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        add_lora(y, x, lora_a_stacked, lora_b_stacked, output_slices, self.token_groups, scale)

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs) -> None:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        hidden = x.new_zeros(x.shape[0], lora_b_stacked.shape[-1])
        shrink(x, lora_a_stacked, self.sampler_groups, hidden, scale)
        expand(hidden, lora_b_stacked, self.sampler_groups, y)


def check_base() -> None:
    """Compare the methods that are replaced with those of this vLLM.

    Raises:
        AttributeError: one of them is missing or takes other parameters.
    """
    for name, ours in vars(GroupedLora).items():
        if not inspect.isfunction(ours) or name == "__init__":
            continue
        expected, found = (list(inspect.signature(f).parameters) for f in (ours, getattr(PunicaWrapperCPU, name)))
        if expected != found:
            raise AttributeError(f"PunicaWrapperCPU.{name} takes {found}, not {expected}")
    for name in ("token_lora_indices", "sampler_indices"):
        if not isinstance(inspect.getattr_static(PunicaWrapperCPU, name, None), property):
            raise AttributeError(f"PunicaWrapperCPU.{name} is not a property")
