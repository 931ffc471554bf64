"""What is known of a role's process, for those who show it."""

from dataclasses import dataclass


@dataclass
class RoleState:
    """`phase` is one of starting, up, waiting (to be restarted), paused (until the disk can be written), stopping,
    stopped, done, failed. `log_start_bytes` is where its log stood when it was last started.
    """

    name: str
    phase: str = "starting"
    restarts: int = 0
    pid: int = 0
    started_s: float = 0.0
    detail: str = ""
    log_start_bytes: int = 0
