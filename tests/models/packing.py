"""Packed rows by the lengths of their sequences, and which keys their queries see."""

import jax
import numpy as np


def packed(rows: list[list[int]], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions of rows of sequences with these lengths, padding behind."""
    segments, positions = np.zeros((2, len(rows), tokens), np.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    return segments, positions


def segment_mask(
    segments: jax.Array,
    positions: jax.Array,
    window_tokens: int | None,
    key_segments: jax.Array | None = None,
    key_positions: jax.Array | None = None,
) -> jax.Array:
    """[row, query, key] True where the query sees the key: same segment, not padding (0), not later, in the window.

    Keys are the queries' own tokens unless given.
    """
    key_segments = segments if key_segments is None else key_segments
    key_positions = positions if key_positions is None else key_positions
    distance = positions[:, :, None] - key_positions[:, None, :]
    seen = (segments[:, :, None] == key_segments[:, None, :]) & (segments[:, :, None] != 0) & (distance >= 0)
    return seen if window_tokens is None else seen & (distance < window_tokens)
