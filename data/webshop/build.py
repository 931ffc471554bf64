"""A small shop in the format of the real one: `python -m data.webshop.build --out=FOLDER --seed=0`.

Writes items_shuffle.json, items_ins_v2.json and items_human_ins.json, which `env.options.path` takes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flowjax.envs.webshop.catalog import generate


def build(out: Path, *, seed: int, products: int) -> None:
    """Write the three files; the same seed writes the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in generate(products, seed).items():
        (out / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m data.webshop.build")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--products", type=int, default=1000)
    given = parser.parse_args(argv)
    build(given.out, seed=given.seed, products=given.products)


if __name__ == "__main__":
    main(sys.argv[1:])
