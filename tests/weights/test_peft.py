"""Adapter folders are complete or absent, and never change."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from flowjax.weights.hand_over import remove_unfinished, write_peft_folder


def test_writes_both_files(tmp_path):
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_peft_folder(tmp_path / "agent@3", {"q.lora_A.weight": transposed}, {"r": 2, "target_modules": ["q_proj"]})
    np.testing.assert_array_equal(
        load_file(tmp_path / "agent@3" / "adapter_model.safetensors")["q.lora_A.weight"], transposed
    )
    assert json.loads((tmp_path / "agent@3" / "adapter_config.json").read_text())["r"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["agent@3"]


def test_never_rewrites_a_folder(tmp_path):
    write_peft_folder(tmp_path / "agent@3", {"x": np.ones(2)}, {})
    with pytest.raises(FileExistsError, match="never change"):
        write_peft_folder(tmp_path / "agent@3", {"x": np.zeros(2)}, {})
    np.testing.assert_array_equal(load_file(tmp_path / "agent@3" / "adapter_model.safetensors")["x"], np.ones(2))


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_peft_folder(tmp_path / "agent@3", {"x": np.ones(2)}, {"not json": object()})
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_writer_are_swept(tmp_path):
    (tmp_path / ".agent@4.abc").mkdir()
    (tmp_path / "agent@3").mkdir()
    (tmp_path / ".judge@4.abc").mkdir()  # under way to another base model's engines
    remove_unfinished(tmp_path, "agent")
    assert {path.name for path in tmp_path.iterdir()} == {"agent@3", ".judge@4.abc"}
