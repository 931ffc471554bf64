"""What data algorithms have learnt, as it is written down."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(MutableMapping[K, V]):
    """A map of which only what has changed is written down, for what grows with the number of tasks.

    Keys and values are numbers, strings, lists, or maps of them. A value is put in anew, not changed in place: a change
    inside it is not noticed.
    """

    def __init__(self, rows: Mapping[K, V] | None = None):
        self._rows = dict(rows or {})
        self.changed: set[K] = set()  # keys put in or taken out since it was last written down

    def __getitem__(self, key: K) -> V:
        return self._rows[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._rows[key] = value
        self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        del self._rows[key]
        self.changed.add(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What has changed in the states of the algorithms since it was last written down, packed.

    `whole` has states without their tables, by the algorithms' names; `rows` those of the tables: the algorithm's name,
    its attribute, key, and value (None: taken out).
    """

    whole: Mapping[str, bytes] = field(default_factory=dict)
    rows: Sequence[tuple[str, str, bytes, bytes | None]] = ()
