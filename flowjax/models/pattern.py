"""Which layers hold the same parameters: the layers of a model as few scans over repeating groups."""

from dataclasses import dataclass

from flowjax.models.shape import ModelConfig

LONGEST_PERIOD = 8  # a scan's body holds so many layers at most


@dataclass(frozen=True)
class Block:
    """Layers start, start + 1, ...: those of one period, with experts (True) or without, `repeats` times over."""

    start: int
    sparse: tuple[bool, ...]
    repeats: int

    @property
    def layers(self) -> range:
        return range(self.start, self.start + len(self.sparse) * self.repeats)


def layer_blocks(config: ModelConfig) -> list[Block]:
    """All layers in order, as blocks; one block of period 1 where all are alike, as in every dense model.

    Ten layers of which every fourth has experts are a block of 2 times 4 layers and one of 2 times 1.
    """
    sparse = tuple(layer in config.sparse_layers for layer in range(config.layers))
    blocks, start = [], 0
    while start < len(sparse):
        block = max(
            (_repeating(sparse, start, period) for period in range(1, LONGEST_PERIOD + 1)),
            key=lambda block: (len(block.layers), -len(block.sparse)),
        )
        blocks.append(block)
        start = block.layers.stop
    return blocks


def _repeating(sparse: tuple[bool, ...], start: int, period: int) -> Block:
    """The block of this period at `start`; of a single layer where nothing repeats."""
    group = sparse[start : start + period]
    repeats = 1
    while sparse[start + repeats * period : start + (repeats + 1) * period] == group:
        repeats += 1
    return Block(start, group, repeats) if repeats > 1 else Block(start, group[:1], 1)
