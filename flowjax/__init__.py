"""Train LLM agents with reinforcement learning in JAX."""

import os
from importlib import metadata

__version__ = "0.1.0"


def _avoid_wrong_products() -> None:
    """Keep XLA's CPU backend of jaxlib before 0.12 from fusing matrix products with its YNN library.

    With it jaxlib 0.10.2 computes x (W + A B) wrongly for 512 tokens (tests/models/test_models_lora.py), jaxlib 0.12
    rightly; 0.11 was not tried. Plain products cost no more time. Has an effect only before JAX first computes.
    """
    flag = "--xla_cpu_experimental_ynn_fusion_type"
    flags = os.environ.get("XLA_FLAGS", "")
    try:
        version = tuple(map(int, metadata.version("jaxlib").split(".")[:2]))
    except metadata.PackageNotFoundError:  # a process that only holds environments needs no JAX
        return
    if (0, 10) <= version < (0, 12) and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}=".strip()


_avoid_wrong_products()
