"""vLLM's LoRA on the CPU on top of `cpu_lora`'s grouped products. Imported inside vLLM only."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.lora.layers import base_linear
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from flowjax.rollout.cpu_lora import RowGroup, add_lora, expand, group_rows, shrink

MERGED_SIZE_LIMIT = 2**20  # elements of a weight; larger ones cost more to merge than a few small batches repay

Apply = Callable[[BaseLinearLayerWithLoRA, torch.Tensor, torch.Tensor | None], torch.Tensor]


class GroupedLora(PunicaWrapperCPU):
    """vLLM's LoRA operations by grouped rows. The rows of a step are grouped once, when vLLM says which adapter each
    row has."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any):
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self.token_groups: list[RowGroup] = []
        self.sampler_groups: list[RowGroup] = []

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self.token_groups = group_rows(self.token_lora_indices)
        self.sampler_groups = group_rows(self.sampler_indices)

    def only_slot(self, rows: int) -> int | None:
        """The slot of the one adapter that all `rows` rows of the step have, if there is one."""
        if len(self.token_groups) == 1:
            slot, group = self.token_groups[0]
            if group == slice(0, rows):  # all of the step, so no row of the base, which is in no group
                return slot
        return None

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


class MergedLinears:
    """A linear layer's answer to a batch of one adapter: a single product with W + B A.

    The sum is formed when it is first needed and kept until vLLM writes to the layer's adapters again. It is only done
    for small, unquantized float32 layers, where it changes nothing but the order of additions.
    """

    def __init__(self, stock: Apply):
        self._stock = stock
        self._kept: WeakKeyDictionary[BaseLinearLayerWithLoRA, dict[int, tuple[Any, torch.Tensor]]]
        self._kept = WeakKeyDictionary()

    def apply(self, layer: BaseLinearLayerWithLoRA, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wrapper = layer.punica_wrapper
        slot = wrapper.only_slot(x.shape[0]) if isinstance(wrapper, GroupedLora) and x.ndim == 2 else None
        if slot is None or not self._mergeable(layer, x):
            return self._stock(layer, x, bias)
        product = x @ self._merged(layer, slot, x.shape[-1])
        return product if bias is None else product.add_(bias)

    @staticmethod
    def _mergeable(layer: BaseLinearLayerWithLoRA, x: torch.Tensor) -> bool:
        return (
            x.dtype == layer.lora_b_stacked[0].dtype == torch.float32
            and x.shape[-1] * sum(layer.output_slices) <= MERGED_SIZE_LIMIT
            and isinstance(layer._get_quant_method(), UnquantizedLinearMethod)
        )

    def _merged(self, layer: BaseLinearLayerWithLoRA, slot: int, inputs: int) -> torch.Tensor:
        """(W + B A)^T of a slot, as the layer's output for the unit vectors: vLLM may keep W in a packed form."""
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        written = tuple(tensor._version for tensor in (*a, *b))  # PyTorch counts the writes to a tensor
        slots = self._kept.setdefault(layer, {})
        if slot not in slots or slots[slot][0] != written:
            unit = torch.eye(inputs)
            merged = layer._get_quant_method().apply(layer.base_layer, unit, None)
            add_lora(merged, unit, a, b, layer.output_slices, [(slot, slice(0, inputs))], 1.0)
            slots[slot] = written, merged
        return slots[slot][1]


def check_vllm() -> None:
    """Check that this vLLM has the methods that are replaced here, with the same parameters.

    Raises:
        AttributeError: a method is missing or takes other parameters.
    """
    ours = {name: method for name, method in vars(GroupedLora).items() if hasattr(PunicaWrapperCPU, name)}
    for name, method in ours.items():
        if inspect.isfunction(method) and name != "__init__":
            _check_parameters(PunicaWrapperCPU, name, list(inspect.signature(method).parameters))
    for name in ("token_lora_indices", "sampler_indices"):
        if not isinstance(inspect.getattr_static(PunicaWrapperCPU, name, None), property):
            raise AttributeError(f"PunicaWrapperCPU.{name} is not a property")
    _check_parameters(BaseLinearLayerWithLoRA, "_apply_sync", ["self", "x", "bias"])
    _check_parameters(BaseLinearLayerWithLoRA, "_get_quant_method", ["self"])
    _check_parameters(base_linear, "_get_lora_device", ["base_layer"])


def _check_parameters(owner: type | ModuleType, name: str, expected: list[str]) -> None:
    found = list(inspect.signature(getattr(owner, name)).parameters)
    if found != expected:
        raise AttributeError(f"{owner.__name__}.{name} takes {found}, not {expected}")


def install(platform_class: type) -> None:
    """Have vLLM use both of the above, and adapters on layers in int8. Doing so again changes nothing."""
    qualified_name = f"{GroupedLora.__module__}.{GroupedLora.__qualname__}"
    platform_class.get_punica_wrapper = classmethod(lambda cls: qualified_name)  # pyright: ignore[reportAttributeAccessIssue]
    stock = BaseLinearLayerWithLoRA._apply_sync
    if stock.__module__ != __name__:
        merged = MergedLinears(stock)
        BaseLinearLayerWithLoRA._apply_sync = lambda self, x, bias=None: merged.apply(self, x, bias)
    # Stock vLLM reads the device from the layer's weight, which int8 layers do not keep once it is packed.
    base_linear._get_lora_device = lambda base_layer: torch.device("cpu")  # pyright: ignore[reportPrivateImportUsage]
