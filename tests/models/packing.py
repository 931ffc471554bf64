"""Packed rows by the lengths of their sequences."""

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
