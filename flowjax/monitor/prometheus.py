"""A role's counts in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4"
# Maps whose keys are data: they become a label instead of prolonging the name.
LABELS = {
    "policies": "policy",
    "bases": "base",
    "serving_versions": "policy",
    "failed": "cause",
    "dropped": "cause",
    "refused": "cause",
    "ages": "age",
    "trained_ages": "age",
}
_PREFIXES = {"policies": "policy", "bases": "base"}
LISTS = {"engines": ("engine", "url")}  # lists of maps: a label, and what in each map is its value
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


def exposition(status: Mapping[str, Any], *, role: str) -> str:
    """Every number of a nested map of counts as a gauge `flowjax_<role>_<name>`.

    The maps named in `LABELS` and the lists named in `LISTS` become labels; other maps prolong the name. Texts and
    other lists are left out, and so is what every policy tells itself. No series comes twice: Prometheus would refuse
    all of them.
    """
    of_policies = [set(counts) for counts in status.get("policies", {}).values() if isinstance(counts, Mapping)]
    told_by_policies = set.intersection(*of_policies) if of_policies else set()
    own = {key: value for key, value in status.items() if key not in told_by_policies}
    samples: dict[str, dict[str, float | int]] = {}
    for name, labels, value in _numbers(own, "", {}):
        written = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        samples.setdefault(f"flowjax_{role}_{name}", {}).setdefault(f"{{{written}}}" if written else "", value)
    lines = []
    for name, values in samples.items():
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _numbers(
    status: Mapping[str, Any], prefix: str, labels: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, str], float | int]]:
    """Name, labels and value of each number in a map whose name is `prefix`."""
    for key, value in status.items():
        fit = _UNFIT.sub("_", str(key))
        name = f"{prefix}_{fit}" if prefix else fit
        if isinstance(value, Mapping) and key in LABELS:
            inner = f"{prefix}_{_PREFIXES.get(key, fit)}" if prefix else _PREFIXES.get(key, fit)
            for text, counts in value.items():
                labelled = {**labels, LABELS[key]: str(text)}
                if isinstance(counts, Mapping):
                    yield from _numbers(counts, inner, labelled)
                else:
                    yield from _number(inner, labelled, counts)
        elif isinstance(value, list) and key in LISTS:
            label, naming = LISTS[key]
            for item in value:
                yield from _numbers(item, name, {**labels, label: str(item.get(naming, ""))})
        elif isinstance(value, Mapping):
            yield from _numbers(value, name, labels)
        else:
            yield from _number(name, labels, value)


def _number(name: str, labels: Mapping[str, str], value: Any) -> Iterator[tuple[str, Mapping[str, str], float | int]]:
    if isinstance(value, bool):
        yield name, labels, int(value)
    elif isinstance(value, int | float):
        yield name, labels, value


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
