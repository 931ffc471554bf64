"""Ids and secrets of a run that its roles show each other: the secrets where they listen beyond loopback.

The token allows everything. A node, which may be anywhere, has a key of its own instead: with it a node can play under
its own name and do nothing else, and it is void once the node is sent away.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from ml_collections import ConfigDict

from flowjax.config import ConfigError
from flowjax.files import replace_file

VARIABLE = "FLOWJAX_TOKEN"  # environment variable, for a machine that lacks the run folder
RUN_HEADER = "X-Flowjax-Run"
_RUN_ID = "run_id"  # file in the run's folder, and in that of each of its nodes
# Folder in the run's: a file for each invited node. Its first line is the key's digest, the rest the reason for which
# the node was sent away, if it was.
_NODES = "nodes"
_NODE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_loopback(host: str) -> bool:
    """True if only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`, as written in a URL."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host


def wants_token(dataflow: ConfigDict) -> bool:
    """True if a dataflow with these settings asks for keys: others than this machine's processes may reach it."""
    return not is_loopback(dataflow.host) or bool(dataflow.relay)


def make_token(run_dir: Path) -> str:
    """The run's token; made at the first call, readable by its owner alone.

    Raises:
        ConfigError: the file is there and empty, as a full disk could leave it: with "" every request would pass.
    """
    path = run_dir / "token"
    if not path.exists():
        replace_file(path, secrets.token_urlsafe(32), mode=0o600)
    return _read(path)


def known_token(run_dir: Path) -> str:
    """The token that a client shows: the run folder's, else (as on a node) that of the environment, else "".

    Raises:
        ConfigError: the file is there and empty.
    """
    path = run_dir / "token"
    # The folder's first: a shell from which a node was started may still have that node's key in its environment.
    return _read(path) if path.exists() else token_of_environment()


def token_of_environment() -> str:
    """The key in the environment, "" if there is none. A newline at its end, as a file may leave it, is not part of it:
    no HTTP header may have one."""
    return os.environ.get(VARIABLE, "").strip()


def make_run_id(run_dir: Path) -> str:
    """The id of a run; made at the first call. It tells a run from others that listen at the same address later.

    A copied folder is another run from its next launch on, with another id: the original may go on, and a relay would
    share its nodes out between the two. A folder counts as a copy if both its inode and its path differ from those that
    the id was written with. Of the same run one of the two may change: the path where the folder was moved, or another
    host mounts it elsewhere; the inode where it was restored, or where a file system makes inodes up, as FUSE may. So
    a copy under its old path, on another machine, keeps the id.
    """
    known, *before = _run_id_lines(run_dir) or [""]
    copied = bool(before) and not set(before) & set(_marks(run_dir))
    keep_run_id(run_dir, secrets.token_hex(8) if copied or not known else known)
    return known_run_id(run_dir)


def keep_run_id(run_dir: Path, run_id: str) -> None:
    """Write the id of the run that the folder belongs to, with the folder's inode and path."""
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(run_dir / _RUN_ID, "\n".join([run_id, *_marks(run_dir)]) + "\n")


def known_run_id(run_dir: Path) -> str:
    """The id of the run that the folder belongs to, "" where it is not written yet."""
    return next(iter(_run_id_lines(run_dir)), "")


def _run_id_lines(run_dir: Path) -> list[str]:
    """The id, then the inode and path of the folder that it was written for."""
    path = run_dir / _RUN_ID
    return path.read_text().splitlines() if path.exists() else []


def _marks(run_dir: Path) -> list[str]:
    return [f"inode {run_dir.stat().st_ino}", f"path {run_dir.resolve()}"]


def of_run(run_id: str) -> dict[str, str]:
    """The HTTP header that names the run a message is meant for; none without an id."""
    return {RUN_HEADER: run_id} if run_id else {}


def _read(path: Path) -> str:
    if not (token := path.read_text().strip()):
        raise ConfigError(f"{path} is empty, so that anybody would be let in: delete it, and a new token is made")
    return token


def bearer(token: str) -> dict[str, str]:
    """HTTP headers that show the token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def accepts(headers: Mapping[str, str], token: str) -> bool:
    """True if a request may pass; every request may where there is no token."""
    shown = headers.get("Authorization", "")
    # aiohttp keeps bytes that are no UTF-8 as surrogates: without the handler, encoding them would raise. The
    # comparison takes constant time, so that its duration tells nothing about the token.
    return not token or hmac.compare_digest(shown.encode(errors="surrogateescape"), f"Bearer {token}".encode())


# -------------------------------------------------------------------------------------------------------- keys of nodes


@dataclass(frozen=True)
class InvitedNode:
    """A node that was invited and shows its key; `sent_away` is the reason if it was sent away, else ""."""

    name: str
    sent_away: str


def invite(run_dir: Path, node: str) -> str:
    """A new key for the node of that name, which it shows as its token; an older key of that name is void from now on.

    Raises:
        ConfigError: `node` is not usable as a name.
        OSError: the run's folder cannot be written.
    """
    if not _NODE_NAME.fullmatch(node):
        raise ConfigError(f"--invite={node}: give a name of 1 to 64 letters, digits, - and _")
    key = f"{node}:{secrets.token_urlsafe(32)}"
    (run_dir / _NODES).mkdir(exist_ok=True)
    replace_file(run_dir / _NODES / node, _digest(key), mode=0o600)
    return key


def is_invited(run_dir: Path, node: str) -> bool:
    """True if a node of that name has a key that is not void."""
    path = run_dir / _NODES / node
    return bool(_NODE_NAME.fullmatch(node)) and path.exists() and not path.read_text().partition("\n")[2]


def send_away(run_dir: Path, node: str, reason: str = "--evict") -> bool:
    """Void the key of a node, until it is invited again. Returns whether there is such a node."""
    path = run_dir / _NODES / node
    if not _NODE_NAME.fullmatch(node) or not path.exists():
        return False
    digest, _, before = path.read_text().partition("\n")
    replace_file(path, f"{digest}\n{before or reason}", mode=0o600)
    return True


def nodes_sent_away(run_dir: Path) -> dict[str, str]:
    """Nodes whose key is void, with the reasons."""
    found = {}
    for path in sorted((run_dir / _NODES).glob("*")):
        with contextlib.suppress(OSError):  # a file that cannot be read at this moment: its node is not reported
            if _NODE_NAME.fullmatch(path.name):
                found[path.name] = path.read_text().partition("\n")[2]
    return {node: reason for node, reason in found.items() if reason}


def node_name(token: str) -> str:
    """Name of the node that a key belongs to; "" for a run's token."""
    return token.partition(":")[0] if ":" in token else ""


def known_node(run_dir: Path, headers: Mapping[str, str]) -> InvitedNode | None:
    """The node of the run whose key a request shows, or None."""
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    name = node_name(key)
    with contextlib.suppress(OSError):
        if _NODE_NAME.fullmatch(name):
            digest, _, reason = (run_dir / _NODES / name).read_text().partition("\n")
            if hmac.compare_digest(digest, _digest(key)):
                return InvitedNode(name, reason)
    return None


def _digest(key: str) -> str:
    """SHA-256 of a key. The folder holds only digests: whoever reads it cannot show a node's key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
