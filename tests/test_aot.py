"""The reading of compiled programs, and two real ones where the compilers are installed."""

from pathlib import Path

import pytest

from tests.benchmarks import aot
from tests.benchmarks.aot_program import collectives, largest_buffers, overlapped, read_program, square_buffers

ROOT = Path(__file__).parent.parent
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_computation (param_0: f32[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %scores.1 = f32[64,64]{1,0} broadcast(%param_0), dimensions={0,1}
  ROOT %add.1 = f32[8,4]{1,0} add(%param_0, %param_0)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.2 = f32[] add(%a, %b)
}

%body (carry: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  %gather.1 = (bf16[4,64]{1,0}, bf16[16,64]{1,0}) all-gather-start(%slice.1), dimensions={0}
  %gather.2 = bf16[16,64]{1,0} all-gather-done(%gather.1)
  ROOT %tuple.1 = (s32[], bf16[16,64]{1,0}) tuple(%count, %gather.2)
}

%condition (carry: (s32[], bf16[16,64])) -> pred[] {
  ROOT %less.1 = pred[] compare(%count, %end), direction=LT
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %loop.1 = (s32[], bf16[16,64]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"36"},"known_init_step":{"init":"0","step":"1"}}
  %reduced.1 = f32[8,4]{1,0} all-reduce(%x), to_apply=%sum
  %wide.1 = bf16[2,64,64]{2,1,0} custom-call(%reduced.1), custom_call_target="kernel"
  ROOT %fusion.1 = f32[8,4]{1,0} fusion(%reduced.1), kind=kLoop, calls=%fused_computation
}
"""


def test_collectives_in_a_loop_count_once_per_round():
    assert collectives(read_program(PROGRAM)) == {"all-gather": (36, 36 * 16 * 64 * 2), "all-reduce": (1, 8 * 4 * 4)}


def test_a_collective_is_overlapped_when_a_product_stands_within_it():
    assert overlapped(read_program(PROGRAM)) == (0, 1)
    with_product = PROGRAM.replace(
        "  %gather.2 =", "  %product.1 = bf16[4,64]{1,0} dot(%slice.1, %slice.2)\n  %gather.2 ="
    )
    assert overlapped(read_program(with_product)) == (1, 1)


def test_what_a_fused_kernel_holds_is_no_buffer():
    program = read_program(PROGRAM)
    assert largest_buffers(program, 2) == ["bf16[2,64,64]", "bf16[16,64]"]
    assert square_buffers(program, 64) == ["bf16[2,64,64]"]
    assert square_buffers(program, 16) == []


def test_every_recipe_is_in_one_group(monkeypatch):
    monkeypatch.chdir(ROOT)
    groups = list(aot.equal_programs(aot.recipes()))
    assert sorted(name for group in groups for name in group) == sorted(aot.recipes())
    assert ["code:qwen3_8b", "code_pair:qwen3_8b"] in groups


def test_an_environment_that_is_not_there_is_named_with_its_remedy(capsys):
    with pytest.raises(SystemExit):
        aot.main(["--python=nowhere/bin/python"])
    assert "nowhere/bin/python, which does not exist: run bash launch/compilers.sh" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / aot.PYTHON).exists(), reason="bash launch/compilers.sh has not been run here")
@pytest.mark.parametrize(
    ("machine", "form", "least", "most"), [("a100x8", "flash", 0.95, 1.1), ("v5e-16", "splash", 0.8, 1.1)]
)
def test_a_recipe_compiles_for_a_gpu_and_a_tpu_within_its_plan(monkeypatch, machine, form, least, most):
    monkeypatch.chdir(ROOT)
    found = aot.compile_recipe(aot.PYTHON, "sokoban:qwen3_8b", machine)
    assert found is not None
    assert found["attention"] == form and not found["scores"]
    assert least < found["plan_bytes"] / found["compiled_bytes"] < most
