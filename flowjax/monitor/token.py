"""The secret that the roles of a run show each other where they listen beyond loopback."""

import hmac
import os
import secrets
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

VARIABLE = "FLOWJAX_TOKEN"  # on a machine that lacks the run folder


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """The address at which this machine reaches what listens on `host`, as a URL writes it."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host


def make_token(run_dir: Path) -> str:
    """The run's token; made at the first call, readable by its owner alone."""
    path = run_dir / "token"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path.read_text().strip()


def known_token(run_dir: Path) -> str:
    """The token that a client shows: of the environment, else of the run folder, else none ("")."""
    path = run_dir / "token"
    return os.environ.get(VARIABLE) or (path.read_text().strip() if path.exists() else "")


def bearer(token: str) -> dict[str, str]:
    """HTTP headers that show the token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def accepts(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request may pass; every request may where there is no token."""
    shown = headers.get("Authorization", "")
    # aiohttp keeps bytes that are no UTF-8 as surrogates, which must not fail to be encoded again.
    return not token or hmac.compare_digest(shown.encode(errors="surrogateescape"), f"Bearer {token}".encode())
