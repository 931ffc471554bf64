"""Shapes that are built in, against the published numbers of parameters."""

import pytest

from flowjax.models.config import known_shape

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_known_shape_has_the_published_number_of_parameters(name: str, parameters: int):
    shape = known_shape(name)
    assert shape is not None and shape.parameter_count() == parameters
    assert known_shape(f"{name}-Instruct") == shape


def test_other_names_are_not_known():
    assert known_shape("Qwen3-9B") is None
