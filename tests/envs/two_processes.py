"""Whether a program prints the same in every process, whatever order hashes give."""

import os
import subprocess
import sys


def printed_in_two_processes(program: str, timeout_s: float = 120.0) -> str:
    """What the program prints, having checked that it prints the same under two hash seeds."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    printed = [process.communicate(timeout=timeout_s)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert printed[0] == printed[1] != ""
    return printed[0]
