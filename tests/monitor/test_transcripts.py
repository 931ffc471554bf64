"""Transcripts: what was kept is read back as it was, and nothing a stranger sends is in their way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowjax.models.nano import build_tokenizer
from flowjax.monitor.transcripts import Credit, read_lines, transcript, whole_prompts, write_lines
from flowjax.records import Task, Trajectory, Turn
from flowjax.report.episodes import RecordedGroup, Texts, index_of
from flowjax.workflows import shown_as
from flowjax.workflows.codec import Codec


def turn(prompt: list[int], reply: list[int], **changes: Any) -> Turn:
    arrays = (np.array(prompt, np.int32), np.array(reply, np.int32), np.full(len(reply), -0.25, np.float32))
    return Turn("agent", 3, *arrays, "stop", 2**64 - 1, 7, -0.1, True, False, **changes)


def read_back(tmp_path: Path, trajectory: Trajectory, credit: Credit | None = None) -> dict[str, Any]:
    write_lines(tmp_path / "a" / "lines.gz", [transcript(Task("t", "w", 0, {"level": "x"}), trajectory, credit)])
    (line,) = read_lines(tmp_path / "a" / "lines.gz")
    return line


def test_prompts_are_kept_without_what_the_turn_before_has_and_read_back_whole(tmp_path: Path):
    prompts = [[1, 2, 3], [1, 2, 3, 9, 4, 5], [1, 2, 8], [7], [7, 9, 7, 9, 1]]
    trajectory = Trajectory("e", "g", "t", 0, [turn(prompt, [9]) for prompt in prompts], {"success": 1.0})
    line = read_back(tmp_path, trajectory)
    assert [each["prompt_shared"] for each in line["turns"]] == [0, 4, 2, 0, 2]
    assert whole_prompts(line["turns"]) == prompts


def test_a_turn_says_which_version_sampled_which_token(tmp_path: Path):
    turns = [turn([1], [2]), turn([1], [2, 3, 4], spans=[(3, 2), (4, 1)])]
    line = read_back(tmp_path, Trajectory("e", "g", "t", 0, turns, {"success": 1.0}, "ok"))
    assert [each.get("spans") for each in line["turns"]] == [None, [[3, 2], [4, 1]]]
    (shown,) = index_of([RecordedGroup("g", [line])])
    assert shown["versions"] == [3, 4]


def test_a_line_has_credit_and_what_people_are_shown(tmp_path: Path):
    shown = shown_as(action="left", view=["#P#"], trace=None)
    trajectory = Trajectory("e", "g", "t", 5, [turn([1], [2], shown=shown)], {"success": 1.0}, shown="not json")
    credit = Credit(0.5, {"success": 1.0}, [0.25], {"episode": np.array([0.75]), "step": np.array([-0.5])})
    line = read_back(tmp_path, trajectory, credit)
    (kept,) = line["turns"]
    assert kept["shown"] == {"action": "left", "view": ["#P#"]}
    assert (kept["advantage"], kept["advantage_parts"]) == (0.25, {"episode": 0.75, "step": -0.5})
    assert (line["reward"], line["rewards"], line["payload"], line["seed"]) == (
        0.5,
        {"success": 1.0},
        {"level": "x"},
        5,
    )
    assert kept["state_key"] == "ffffffffffffffff"
    assert line["shown"] == {"text": "not json"}, "another rollout may send any text"


def test_equal_lines_are_equal_files_and_a_torn_one_is_read_as_far_as_it_goes(tmp_path: Path):
    lines = [{"number": number, "text": "x" * 1000} for number in range(100)]
    for name in ("a", "b"):
        write_lines(tmp_path / name, lines)
    whole = (tmp_path / "a").read_bytes()
    assert whole == (tmp_path / "b").read_bytes()
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    found = list(read_lines(tmp_path / "a"))
    assert found == lines[: len(found)]
    (tmp_path / "a").write_bytes(b"no gzip")
    assert list(read_lines(tmp_path / "a")) == list(read_lines(tmp_path / "missing")) == []
    (tmp_path / "a").write_bytes(whole[:10] + b"\xff" * 40)  # what a disk may give for a block that it has lost
    assert list(read_lines(tmp_path / "a")) == []


def test_what_is_shown_is_data_and_never_too_much():
    assert json.loads(shown_as(view=("a", {"b": 1.5}), action="go")) == {"view": ["a", {"b": 1.5}], "action": "go"}
    assert json.loads(shown_as(action="x" * 10**6, view="seen"))["view"] == "seen"
    assert len(shown_as(action="go", view=["y" * 3999] * 100)) < 100, "what does not fit is left out"
    assert json.loads(shown_as(action="go", trace=object())) == {"action": "go"}
    assert shown_as(action="", view=None) == ""


def test_the_text_of_tokens_without_a_tokenizer_is_their_numbers(tmp_path: Path):
    texts = Texts(tmp_path)
    assert "no readable tokenizer.json" in texts.problem
    assert (texts.text([5, 6]), texts.pieces([5, 6])) == ("5 6", ["5 ", "6 "])


@pytest.mark.parametrize("words", ["left up", "up", "√ _ X"])
def test_the_text_of_single_tokens_adds_up_to_the_whole(tmp_path: Path, words: str):
    build_tokenizer(["left", "up", "√", "_", "X"], tmp_path)
    ids = Codec(tmp_path).encode_reply(words)
    texts = Texts(tmp_path)
    assert "".join(texts.pieces(ids)) == texts.text(ids) == f"{words} <eos>"
