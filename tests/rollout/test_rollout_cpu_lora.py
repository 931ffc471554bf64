"""Grouped LoRA products against a loop over rows."""

import logging
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flowjax.rollout import cpu_lora
from flowjax.rollout.cpu_lora import add_lora, expand, group_rows, shrink

SLOTS, RANK, INPUTS, WIDTHS = 4, 3, 10, (6, 2, 5)
BATCHES = {
    "one adapter": [2] * 7,
    "base only": [-1] * 5,
    "base between adapters": [0, 0, -1, -1, 3, 3, 3],
    "adapters in turn": [1, -1, 0, 1, 0, -1, 1, 3],
    "last slot and base": [3, -1, 3, -1],
    "one row": [1],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=BATCHES.values(), ids=list(BATCHES))
def slots(request):
    return torch.tensor(request.param)


def _weights(dtype=torch.float32):
    a = [torch.randn(SLOTS, 1, RANK, INPUTS, dtype=dtype) for _ in WIDTHS]
    b = [torch.randn(SLOTS, 1, width, RANK, dtype=dtype) for width in WIDTHS]
    return a, b


def _row_by_row(y, x, a, b, slots, scale):
    expected = y.double().clone()
    for row, slot in enumerate(slots.tolist()):
        start = 0
        for lora_a, lora_b, width in zip(a, b, WIDTHS, strict=True):
            if slot >= 0:
                hidden = lora_a[slot, 0].double() @ x[row].double()
                expected[row, start : start + width] += scale * (lora_b[slot, 0].double() @ hidden)
            start += width
    return expected


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_adds_each_rows_own_adapter(slots, scale):
    a, b = _weights()
    x, y = torch.randn(len(slots), INPUTS), torch.randn(len(slots), sum(WIDTHS))
    expected = _row_by_row(y, x, a, b, slots, scale)
    add_lora(y, x, a, b, WIDTHS, group_rows(slots), scale)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_base_rows_are_untouched(slots):
    a, b = _weights()
    x, y = torch.randn(len(slots), INPUTS), torch.randn(len(slots), sum(WIDTHS))
    before = y.clone()
    add_lora(y, x, a, b, WIDTHS, group_rows(slots), 1.0)
    assert torch.equal(y[slots < 0], before[slots < 0])
    assert not torch.isclose(y[slots >= 0], before[slots >= 0]).all(dim=1).any()


def test_half_precision_activations(slots):
    a, b = _weights(torch.bfloat16)
    x, y = torch.randn(len(slots), INPUTS).bfloat16(), torch.randn(len(slots), sum(WIDTHS)).bfloat16()
    expected = _row_by_row(y, x, a, b, slots, 1.0)
    add_lora(y, x, a, b, WIDTHS, group_rows(slots), 1.0)
    torch.testing.assert_close(y.double(), expected, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("add", [True, False])
def test_shrink_then_expand(slots, add):
    """The two halves that vLLM calls apart when the adapter is sharded, in float32 between bfloat16 layers."""
    a, b = _weights(torch.bfloat16)
    x, y = torch.randn(len(slots), INPUTS).bfloat16(), torch.randn(len(slots), WIDTHS[0] + 2).bfloat16()
    start = y if add else torch.where((slots >= 0)[:, None] & (torch.arange(y.shape[1]) < WIDTHS[0]), 0, y)
    expected = start.double().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            hidden = 2.0 * (a[0][slot, 0].double() @ x[row].double())
            expected[row, : WIDTHS[0]] += b[0][slot, 0].double() @ hidden
    hidden = torch.zeros(len(slots), RANK)
    shrink(x, a[0], group_rows(slots), hidden, 2.0)
    expand(hidden, b[0], group_rows(slots), y, add)
    torch.testing.assert_close(y.double(), expected, atol=0.3, rtol=0.05)


def test_groups_hold_every_adapter_row_once(slots):
    seen = torch.zeros(len(slots), dtype=torch.long)
    for slot, rows in group_rows(slots):
        assert (slots[rows] == slot).all()
        seen[rows] += 1
    assert torch.equal(seen, (slots >= 0).long())


def test_unknown_vllm_is_left_alone_with_one_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)  # an import of it fails
    monkeypatch.setattr(cpu_lora.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        cpu_lora.register()
    assert len(caplog.records) == 1
    assert "leaves it as it is" in caplog.text


@pytest.fixture
def vllm_cpu(monkeypatch):
    """vLLM's CPU platform class; it and the layer class are put back as they were afterwards."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.platforms import current_platform

    platform_class = type(current_platform)
    monkeypatch.setattr(BaseLinearLayerWithLoRA, "_apply_sync", BaseLinearLayerWithLoRA._apply_sync)
    monkeypatch.setattr(platform_class, "get_punica_wrapper", platform_class.get_punica_wrapper)
    return platform_class


@pytest.mark.integration
def test_register_replaces_vllms_classes_once(vllm_cpu):
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.utils.import_utils import resolve_obj_by_qualname

    stock = BaseLinearLayerWithLoRA._apply_sync
    cpu_lora.register()
    replaced = BaseLinearLayerWithLoRA._apply_sync
    assert replaced is not stock
    cpu_lora.register()
    assert BaseLinearLayerWithLoRA._apply_sync is replaced
    assert resolve_obj_by_qualname(vllm_cpu.get_punica_wrapper()).__name__ == "GroupedLora"


@pytest.mark.integration
def test_changed_vllm_is_left_alone(vllm_cpu, monkeypatch, caplog):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    stock = vllm_cpu.get_punica_wrapper()
    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", lambda self, y, x: None)
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        cpu_lora.register()
    assert vllm_cpu.get_punica_wrapper() == stock
    assert "add_lora_linear" in caplog.text


@pytest.mark.integration
def test_other_platforms_are_left_alone(vllm_cpu, monkeypatch):
    stock = vllm_cpu.get_punica_wrapper()
    monkeypatch.setattr(vllm_cpu, "is_cpu", lambda self: False)
    cpu_lora.register()
    assert vllm_cpu.get_punica_wrapper() == stock


@pytest.mark.integration
def test_vllms_operations_in_a_mixed_batch():
    """Through vLLM's own bookkeeping: adapters 11 and 12 in slots 2 and 3, base rows between them."""
    from vllm.lora.layers import LoRAMapping

    from flowjax.rollout.cpu_lora_wrapper import GroupedLora

    ids = (11, 11, 0, 12, 0, 0, 12)
    wrapper = GroupedLora(max_num_batched_tokens=16, max_batches=16, device="cpu")
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [None, None, 11, 12], SLOTS, 64)
    slots = torch.tensor([{0: -1, 11: 2, 12: 3}[adapter] for adapter in ids])
    a, b = _weights()
    x, y = torch.randn(len(ids), INPUTS), torch.randn(len(ids), sum(WIDTHS))
    expected = _row_by_row(y, x, a, b, slots, 1.0)
    halves = y.clone()
    wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, WIDTHS)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)

    hidden = torch.zeros(len(WIDTHS), len(ids), RANK)
    wrapper.add_shrink(hidden, x, tuple(a), 1.0)
    wrapper.add_expand(halves, hidden, tuple(b), WIDTHS)
    torch.testing.assert_close(halves.double(), expected, atol=1e-5, rtol=1e-5)

    logits = torch.zeros(len(ids), WIDTHS[0])
    wrapper.add_lora_logits(logits, x, a[0], b[0], 1.0)
    whole = _row_by_row(torch.zeros(len(ids), sum(WIDTHS)), x, a, b, slots, 1.0)
    torch.testing.assert_close(logits.double(), whole[:, : WIDTHS[0]], atol=1e-5, rtol=1e-5)


class Layer:
    """As much of vLLM's fused linear layer with adapters as is asked for; counts products with its base weight."""

    def __init__(self, dtype=torch.float32, quantized=False):
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        from flowjax.rollout.cpu_lora_wrapper import GroupedLora

        a, b = _weights(dtype)
        self.lora_a_stacked, self.lora_b_stacked = tuple(a), tuple(b)
        self.output_slices, self.base_layer = WIDTHS, torch.nn.Linear(INPUTS, sum(WIDTHS), bias=False, dtype=dtype)
        self.punica_wrapper = GroupedLora(max_num_batched_tokens=16, max_batches=16, device="cpu")
        self.products = 0

        def apply(layer, x, bias=None):
            self.products += 1
            return torch.nn.functional.linear(x, layer.weight.detach(), bias)

        self.method = SimpleNamespace() if quantized else UnquantizedLinearMethod()
        self.method.apply = apply

    def set_slots(self, *slots: int) -> torch.Tensor:
        from vllm.lora.layers import LoRAMapping

        ids = tuple(slot + 1 for slot in slots)
        self.punica_wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [1, 2, 3, 4], SLOTS, 64)
        return torch.tensor(slots)

    def _get_quant_method(self):
        return self.method


@pytest.mark.integration
def test_merged_product_follows_the_adapters():
    """One adapter in the step: one product with the merged weight, formed anew when vLLM has written to a slot."""
    from flowjax.rollout.cpu_lora_wrapper import MergedLinears

    layer: Any = Layer()
    bias = torch.randn(sum(WIDTHS))
    linears = MergedLinears(lambda layer, x, bias: pytest.fail("stock"))
    for step, (slot, products) in enumerate([(2, 1), (2, 1), (0, 2), (2, 2), (2, 3)]):
        slots, x = layer.set_slots(*[slot] * 5), torch.randn(5, INPUTS)
        if step == 4:
            layer.lora_b_stacked[1][2] = torch.randn(1, WIDTHS[1], RANK)
        y = torch.nn.functional.linear(x, layer.base_layer.weight.detach(), bias)
        expected = _row_by_row(y, x, layer.lora_a_stacked, layer.lora_b_stacked, slots, 1.0)
        torch.testing.assert_close(linears.apply(layer, x, bias).double(), expected, atol=1e-5, rtol=1e-5)
        assert layer.products == products


@pytest.mark.integration
@pytest.mark.parametrize("slots", [(1, 1, -1), (1, 2, 2), (-1, -1, -1)])
def test_other_batches_are_left_to_the_layer(slots):
    from flowjax.rollout.cpu_lora_wrapper import MergedLinears

    layer, stock = cast(Any, Layer()), cast(Any, lambda *arguments: "stock")
    layer.set_slots(*slots)
    assert MergedLinears(stock).apply(layer, torch.randn(3, INPUTS)) == "stock"


@pytest.mark.integration
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"quantized": True}])
def test_rounded_weights_are_not_merged(options):
    from flowjax.rollout.cpu_lora_wrapper import MergedLinears

    layer, stock = cast(Any, Layer(**options)), cast(Any, lambda *arguments: "stock")
    layer.set_slots(1, 1, 1)
    x = torch.randn(3, INPUTS, dtype=options.get("dtype", torch.float32))
    assert MergedLinears(stock).apply(layer, x) == "stock"
