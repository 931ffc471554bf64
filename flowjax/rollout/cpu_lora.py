"""A vLLM plug-in: LoRA on vLLM's CPU backend by matrix products, one pair per adapter in the batch.

Stock vLLM gathers a copy of A and B for every token of the batch, which costs far more than the product itself, and
gives rows of the base model (slot -1) the adapter of the last slot when they share a batch with adapter rows. Here the
rows of each adapter are multiplied together, and base rows are left alone. A step of one adapter alone, the usual case,
costs no more than the base model.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in each of its processes. On
GPUs, and on a vLLM whose internals are not those expected, it changes nothing.
"""

import logging
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int

logger = logging.getLogger("vllm.flowjax")  # a child of vLLM's own logger, so that it is shown

RowGroup = tuple[int, slice | torch.Tensor]
"""An adapter's slot, and its rows in the batch: a slice where they are contiguous, their indices otherwise."""


def group_rows(slots: Int[torch.Tensor, "rows"]) -> list[RowGroup]:
    """Rows by adapter slot. Rows of slot -1 belong to the base model and are in no group."""
    values, counts = torch.unique_consecutive(slots, return_counts=True)
    runs: dict[int, list[slice]] = {}
    start = 0
    for slot, count in zip(values.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            runs.setdefault(slot, []).append(slice(start, start + count))
        start += count
    # One run is a slice, a view; an adapter with several is gathered by index, at the price of a copy.
    return [(slot, of[0] if len(of) == 1 else (slots == slot).nonzero()[:, 0]) for slot, of in runs.items()]


def shrink(
    x: Float[torch.Tensor, "rows inputs"],
    lora_a: Float[torch.Tensor, "slots 1 rank inputs"],
    groups: Sequence[RowGroup],
    out: Float[torch.Tensor, "rows padded_rank"],
    scale: float,
) -> None:
    """out[rows of s] = scale * x[rows of s] A_s^T for every adapter s; other rows keep what they hold."""
    for slot, rows in groups:
        a = lora_a[slot, 0]
        out[rows, : a.shape[0]] = (x[rows].to(a.dtype) @ a.T).to(out.dtype) * scale


def expand(
    hidden: Float[torch.Tensor, "rows rank"],
    lora_b: Float[torch.Tensor, "slots 1 outputs rank"],
    groups: Sequence[RowGroup],
    out: Float[torch.Tensor, "rows padded_outputs"],
    add: bool = True,
) -> None:
    """out[rows of s] += hidden[rows of s] B_s^T for every adapter s (replaced instead of added if not `add`)."""
    for slot, rows in groups:
        b = lora_b[slot, 0]
        width = min(b.shape[0], out.shape[1])  # a vocabulary may be padded differently in model and adapter
        _accumulate(out, rows, slice(0, width), hidden[rows].to(b.dtype), b[:width], add)


def add_lora(
    y: Float[torch.Tensor, "rows outputs"],
    x: Float[torch.Tensor, "rows inputs"],
    lora_a: Sequence[Float[torch.Tensor, "slots 1 rank inputs"]],
    lora_b: Sequence[Float[torch.Tensor, "slots 1 slice_outputs rank"]],
    widths: Sequence[int],
    groups: Sequence[RowGroup],
    scale: float,
) -> None:
    """y += scale * x A_s^T B_s^T on the rows of each adapter s, slice by slice of the outputs of a fused layer."""
    for slot, rows in groups:
        inputs = x[rows].to(lora_a[0].dtype)
        start = 0
        for a, b, width in zip(lora_a, lora_b, widths, strict=True):
            hidden = inputs @ a[slot, 0].T
            if scale != 1.0:
                hidden *= scale
            _accumulate(y, rows, slice(start, start + width), hidden, b[slot, 0], add=True)
            start += width


def _accumulate(
    out: torch.Tensor, rows: slice | torch.Tensor, columns: slice, left: torch.Tensor, right: torch.Tensor, add: bool
) -> None:
    """out[rows, columns] (+)= left right^T, without a temporary where the rows are a slice of the same type."""
    if isinstance(rows, slice) and add and out.dtype == left.dtype:
        out[rows, columns].addmm_(left, right.T)
        return
    product = (left @ right.T).to(out.dtype)
    if isinstance(rows, slice):
        target = out[rows, columns]
        target.copy_(target + product if add else product)
    elif add:
        out[:, columns].index_add_(0, rows, product)
    else:
        out[:, columns].index_copy_(0, rows, product)


def register() -> None:
    """Have vLLM's CPU backend use the grouped products. vLLM calls this in each process; once or twice is the same."""
    try:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        from flowjax.rollout.cpu_lora_wrapper import check_vllm, install

        check_vllm()
    except (ImportError, AttributeError) as error:
        logger.warning(
            "flowjax does not know this vLLM's LoRA code (%s) and leaves it as it is: on CPU it will be slow, and"
            " base and adapter requests must not share a batch.",
            error,
        )
        return
    install(type(current_platform))
