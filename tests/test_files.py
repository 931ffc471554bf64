"""One way to replace a file, and what depends on it: the run's token is never empty, never half there."""

import os
import stat
from pathlib import Path

import pytest

from flowjax.config import ConfigError, default_config
from flowjax.dataflow.ledger import open_tables
from flowjax.files import replace_file, sampled_digest_of
from flowjax.monitor.token import VARIABLE, known_token, make_token


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    replace_file(path, "one")
    replace_file(path, "two", durable=False)
    assert path.read_text() == "two" and list(tmp_path.iterdir()) == [path]


def test_a_sampled_digest_is_of_the_length_and_of_pieces_all_over(tmp_path):
    path, content = tmp_path / "file", bytearray(9_000_000)
    digests = set()
    for at in (0, 4_500_000, 8_998_000):
        path.write_bytes(content[:at] + bytes([1] * 9000) + content[at + 9000 :])
        digests.add(sampled_digest_of(path))
    path.write_bytes(content)
    assert sampled_digest_of(path) == sampled_digest_of(path)
    digests.add(sampled_digest_of(path))
    path.write_bytes(content[:-1])
    assert len(digests | {sampled_digest_of(path)}) == 5


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_fault_leaves_what_was_there_and_nothing_beside_it(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    replace_file(path, "one")

    def full(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    if call == "write":  # a real one: nothing may be created here
        beside = tmp_path / f".file.{os.getpid()}-0"
        monkeypatch.setattr("threading.get_ident", lambda: 0)
        beside.mkdir()
        (beside / "full").touch()
    else:
        monkeypatch.setattr(os if call == "fsync" else Path, call, full)
    with pytest.raises(OSError):
        replace_file(path, "two")
    monkeypatch.undo()
    assert path.read_text() == "one"
    assert [entry for entry in tmp_path.iterdir() if entry.is_file()] == [path]


def test_a_token_is_its_owners_and_an_empty_one_is_refused(tmp_path):
    """An empty file, as a crash between creating and writing left it, let everybody in beyond loopback."""
    token = make_token(tmp_path)
    assert len(token) > 30 and make_token(tmp_path) == known_token(tmp_path) == token
    assert mode(tmp_path / "token") == 0o600
    for text in ("", "\n"):
        (tmp_path / "token").write_text(text)
        for read in (make_token, known_token):
            with pytest.raises(ConfigError, match=r"token is empty.*delete it"):
                read(tmp_path)


def test_a_run_of_its_own_token_heeds_no_key_that_the_shell_still_has(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "berlin:key")
    assert known_token(tmp_path) == "berlin:key", "on a node there is no other"
    token = make_token(tmp_path)
    assert known_token(tmp_path) == token


def test_a_token_that_cannot_be_written_is_not_there(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        make_token(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert make_token(tmp_path)


def test_the_ledger_which_holds_the_key_of_the_leases_is_its_owners(tmp_path):
    path = tmp_path / "dataflow.sqlite"
    path.touch(mode=0o644)  # of a run from before
    db = open_tables(path)
    db.execute("INSERT OR REPLACE INTO keys VALUES ('x', 'y')")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["dataflow.sqlite", "dataflow.sqlite-shm", "dataflow.sqlite-wal"]
    assert {mode(file) for file in files} == {0o600}
    db.close()


def test_a_run_without_a_token_needs_none(tmp_path):
    assert known_token(tmp_path) == "" and default_config().dataflow.host == "127.0.0.1"
