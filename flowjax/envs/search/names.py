"""Invented names that never collide, and the few relations that the generated corpus knows."""

import functools

import numpy as np

from flowjax.envs.base import WorldError

# Every syllable has three letters and ends in one that English stemming leaves alone, so that a name can be cut back
# into its syllables and no two names share a stem.
SYLLABLES = tuple(onset + rime for onset in "bdghlmnrstvz" for rime in ("ak", "em", "op", "ux"))
_KNOWN = frozenset(SYLLABLES)
LETTERS = 3  # of a syllable
SHARE_OF_NAMES = 2  # at most one in so many possible names is given away

# What a document of each kind tells: a relation and the kind of what it leads to.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "book": (("author", "person"), ("publisher", "company"), ("hero", "person")),
    "person": (("birthplace", "town"), ("teacher", "person"), ("employer", "company")),
    "company": (("founder", "person"), ("seat", "town"), ("rival", "company")),
    "town": (("mayor", "person"), ("waterway", "river"), ("twin", "town")),
    "river": (("source", "town"), ("ferryman", "person"), ("tributary", "river")),
}
RELATIONS = tuple(dict.fromkeys(relation for facts in KINDS.values() for relation, _ in facts))


def syllables_for(count: int) -> int:
    """Syllables that `count` names need, two at least.

    Raises:
        WorldError: four are not enough.
    """
    for syllables in (2, 3, 4):
        if count * SHARE_OF_NAMES <= len(SYLLABLES) ** syllables:
            return syllables
    raise WorldError(
        f"env.options documents={count}: there are names for {len(SYLLABLES) ** 4 // SHARE_OF_NAMES}; give fewer"
    )


def draw_names(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different names of the same length, in an order that tells nothing about them."""
    syllables = syllables_for(count)
    numbers = rng.permutation(len(SYLLABLES) ** syllables)[:count]
    parts = []
    for _ in range(syllables):
        parts.append([SYLLABLES[digit] for digit in (numbers % len(SYLLABLES)).tolist()])
        numbers = numbers // len(SYLLABLES)
    return ["".join(name).capitalize() for name in zip(*parts, strict=True)]


@functools.lru_cache(maxsize=1 << 16)
def split_name(word: str) -> tuple[str, ...] | None:
    """The syllables of an invented name, None for any other word."""
    if len(word) < 2 * LETTERS or len(word) % LETTERS or not word[0].isupper():
        return None
    parts = tuple(word.lower()[start : start + LETTERS] for start in range(0, len(word), LETTERS))
    return parts if _KNOWN.issuperset(parts) else None
