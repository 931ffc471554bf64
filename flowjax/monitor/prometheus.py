"""A role's counts in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4"
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


def exposition(status: Mapping[str, Any], *, role: str) -> str:
    """Every number of a nested map of counts as a gauge `flowjax_<role>_<name>`.

    A map under `policies` becomes the label `policy`; other maps prolong the name. Texts and lists are left out.
    """
    samples: dict[str, list[str]] = {}
    for name, labels, value in _numbers(status):
        written = "".join(f'{{{key}="{_escape(text)}"}}' for key, text in labels.items())
        samples.setdefault(f"flowjax_{role}_{name}", []).append(f"{written} {value}")
    lines = []
    for name, values in samples.items():
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{name}{value}" for value in values]
    return "\n".join(lines) + "\n"


def _numbers(status: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, str], float | int]]:
    for key, value in status.items():
        if key == "policies" and isinstance(value, Mapping):
            for policy, counts in value.items():
                yield from ((f"policy_{name}", {"policy": policy}, number) for name, _, number in _numbers(counts))
            continue
        name = prefix + _UNFIT.sub("_", str(key))
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}_")
        elif isinstance(value, bool):
            yield name, {}, int(value)
        elif isinstance(value, int | float):
            yield name, {}, value


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
