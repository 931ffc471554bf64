"""States that look alike taken for one: anchors for GiGPO where texts differ in details that do not matter."""

import zlib
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flowjax.credit.table import TurnTable


def similar_states(
    table: TurnTable,
    texts: Sequence[str],
    *,
    threshold: float = 0.95,
    linkage: Literal["components", "first"] = "components",
    shingle: int = 3,
    buckets: int = 4096,
) -> Int[np.ndarray, "turns"]:
    """Anchor of each row: equal for turns of one task whose texts are at least `threshold` alike.

    Likeness is Dice's coefficient of the texts' character shingles, 2 |a and b| / (|a| + |b|) as multisets, hashed into
    `buckets`. `components` joins whatever is connected by likeness, in any order; `first` goes through the texts in
    order and joins each to the first anchor that it is like, as GiGPO's code does.

    Args:
        table: the turns.
        texts: what each turn started from, one for each row before the padding.
        threshold: least likeness, 1 for equal shingles.
        linkage: how pairs become anchors.
        shingle: characters in a shingle.
        buckets: of the hash; more are more exact.
    """
    rows = table.mask.shape[0]
    if len(texts) > rows:
        raise ValueError(f"there are {len(texts)} texts and {rows} rows")
    task = np.asarray(table.task)[: len(texts)]
    anchors = np.zeros(rows, np.int32)
    total = 0
    for index in np.unique(task):
        chosen = np.flatnonzero(task == index)
        distinct, text_of = np.unique([texts[row] for row in chosen], return_inverse=True)
        order = np.argsort(np.unique(text_of, return_index=True)[1])  # by first appearance, for `first`
        place = np.argsort(order)
        counts = np.stack([_shingle_counts(text, shingle, buckets) for text in distinct[order]])
        alike = np.asarray(_likeness(counts)) >= threshold
        label = np.asarray(_components(alike)) if linkage == "components" else _first_alike(alike)
        dense = np.unique(label, return_inverse=True)[1]
        anchors[chosen] = total + dense[place[text_of]]
        total += dense.max() + 1
    anchors[len(texts) :] = total
    return anchors


def _shingle_counts(text: str, shingle: int, buckets: int) -> Float[np.ndarray, "buckets"]:
    data = text.encode()
    hashes = [zlib.crc32(data[start : start + shingle]) % buckets for start in range(max(len(data) - shingle + 1, 1))]
    return np.bincount(hashes, minlength=buckets).astype(np.float32)


@jax.jit
def _likeness(counts: Float[Array, "texts buckets"]) -> Float[Array, "texts texts"]:
    """2 sum of min(a, b) / (sum a + sum b), and sum of min(a, b) = (sum a + sum b - |a - b|) / 2."""
    sizes = counts.sum(axis=1)
    apart = jax.lax.map(lambda one: jnp.abs(counts - one).sum(axis=1), counts)
    return 1.0 - apart / (sizes[:, None] + sizes[None, :])


@jax.jit
def _components(alike: Bool[Array, "texts texts"]) -> Int[Array, "texts"]:
    """The least index that each text is connected with."""
    texts = alike.shape[0]

    def spread(carry):
        label, _ = carry
        return jnp.where(alike, label[None, :], texts).min(axis=1), label

    start = jnp.arange(texts)
    return jax.lax.while_loop(lambda c: jnp.any(c[0] != c[1]), spread, spread((start, start)))[0]


def _first_alike(alike: Bool[np.ndarray, "texts texts"]) -> Int[np.ndarray, "texts"]:
    anchors: list[int] = []
    label = np.zeros(len(alike), np.int64)
    for text in range(len(alike)):
        known = [anchor for anchor in anchors if alike[text, anchor]]
        if not known:
            anchors.append(text)
        label[text] = known[0] if known else text
    return label
