"""What is known of a role's process, for those who show it."""

from dataclasses import dataclass


@dataclass
class RoleState:
    """`phase` is one of starting, up, waiting (to be restarted), stopping, stopped, done, failed."""

    name: str
    phase: str = "starting"
    restarts: int = 0
    pid: int = 0
    started_s: float = 0.0
    detail: str = ""
