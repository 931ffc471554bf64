"""A trainer without JAX or any part of flowjax: it counts, and speaks as docs/dataflow.md says.

    python foreign_trainer.py URL VERSION_FILE STEPS

Its "model" is how often each digit was advantageous; a version is published by writing its number to a file.
"""

import json
import struct
import sys
import urllib.request
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgpack


def post(url: str, name: str, **body: Any) -> dict[str, Any]:
    data = msgpack.packb({"schema": 1, "body": body})
    with urllib.request.urlopen(f"{url}/{name}", data=data) as answer:
        return msgpack.unpackb(answer.read())["body"]


def numbers(array: dict[str, Any]) -> list:
    code = {"<i4": "i", "<f4": "f", "|b1": "?"}[array["__array__"]]
    return list(struct.unpack(f"<{array['shape'][0]}{code}", array["data"]))


def main(url: str, version_file: Path, steps: int) -> None:
    version = int(version_file.read_text()) if version_file.exists() else 0
    advantages: defaultdict[int, float] = defaultdict(float)
    epoch, claimed, trainer = 0, False, uuid.uuid4().hex
    while not claimed:
        answer = post(url, "claim", trainer=trainer, policies={"agent": version}, after=epoch)
        claimed, epoch = answer["claimed"], answer["epoch"]
    while version < steps:
        answer = post(url, "batch", policy="agent", step=version, epoch=epoch)
        if answer["state"] == "wait":
            continue
        for row in answer["rows"]:
            sampled = zip(*(numbers(row[name]) for name in ("tokens", "sampled", "advantages")), strict=True)
            for token, is_sampled, advantage in sampled:
                advantages[token] += advantage if is_sampled else 0.0
        version += 1
        partial = version_file.with_suffix(".partial")
        partial.write_text(str(version))
        partial.replace(version_file)
        post(url, "committed", policy="agent", version=version, epoch=epoch)
        ages = [version - 1 - v for row in answer["rows"] for v in numbers(row["versions"]) if v >= 0]
        print(json.dumps({"version": version, "rows": len(answer["rows"]), "oldest": max(ages)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
