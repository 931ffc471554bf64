"""Weight-only quantisation of a frozen base: int8 columns, or 4-bit NormalFloat blocks as in QLoRA (arXiv 2305.14314).

Matrices are stored in codes and dequantised where they are multiplied, one layer at a time; the backward pass
dequantises them again instead of keeping them. Embedding, head, norms, biases and experts stay as they are.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from flowjax.models.params import SPARSE, matrix_sizes, owners
from flowjax.models.shape import ModelConfig, ModelError

KINDS = ("int8", "nf4")
NF4_BLOCK = 64  # inputs of a column that share a scale; smaller where a matrix is no multiple of it
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: QLoRA, appendix E.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["kind", "dtype"])
@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [..., in, out] as codes and scales; `x @ matrix` is x times the dequantised matrix.

    codes: int8 [..., in, out], or for nf4 uint8 [..., in / 2, out] with inputs 2i and 2i + 1 in the low and high half.
    scales: float32 [..., blocks, out].
    """

    codes: Any  # unchecked, as `scales`: JAX also builds one of other leaves, such as float0 in a gradient
    scales: Any
    kind: str
    dtype: Any = field(default=jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, inputs, outputs = self.codes.shape
        return (*stack, inputs * (2 if self.kind == "nf4" else 1), outputs)

    def __getitem__(self, place: Any) -> Array:
        """The matrix at a place of the stack, in float32."""
        return QuantizedMatrix(self.codes[place], self.scales[place], self.kind, jnp.float32).dequantized()

    def dequantized(self) -> Float[Array, "*stack in out"]:
        if self.kind == "int8":
            values = self.codes.astype(jnp.float32)
        else:
            halves = jnp.stack([self.codes & 15, self.codes >> 4], axis=-2)
            values = jnp.asarray(NF4_VALUES, jnp.float32)[halves.reshape(self.shape)]
        *stack, inputs, outputs = self.shape
        blocks = values.reshape(*stack, self.scales.shape[-2], -1, outputs) * self.scales[..., None, :]
        return blocks.reshape(*stack, inputs, outputs).astype(self.dtype)

    def __rmatmul__(self, x: Float[Array, "*tokens in"]) -> Float[Array, "*tokens out"]:
        return _product(x, self)


@jax.custom_vjp
def _product(x: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
    return x @ matrix.dequantized()


def _forward(x: jax.Array, matrix: QuantizedMatrix) -> tuple[jax.Array, QuantizedMatrix]:
    return _product(x, matrix), matrix


def _backward(matrix: QuantizedMatrix, gradient: jax.Array) -> tuple[jax.Array, Any]:
    """Only x has a gradient: the base is frozen."""
    # JAX wants a gradient for every leaf: zeros for floats, and for integer codes float0, its type of no gradient.
    nothing = jax.tree.map(
        lambda leaf: (
            jnp.zeros_like(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(leaf.shape, jax.dtypes.float0)
        ),
        matrix,
    )
    return gradient @ matrix.dequantized().swapaxes(-1, -2), nothing


_product.defvjp(_forward, _backward)


def quantized_matrix(matrix: Float[Array, "layers in out"], kind: str) -> QuantizedMatrix:
    """The matrices in their nearest codes, laid out over devices as they are.

    int8: one scale a column, error at most scale / 2; nf4: one scale for each block of a column.

    Raises:
        ModelError: an unknown kind, or nf4 of a matrix with an odd number of inputs.
    """
    if kind not in KINDS:
        raise ModelError(f"config.model.quantize is {kind!r}: use one of '', {', '.join(map(repr, KINDS))}")
    if kind == "nf4" and matrix.shape[-2] % 2:
        raise ModelError(
            f"config.model.quantize is 'nf4', but a matrix has {matrix.shape[-2]} inputs, an odd number: use 'int8'"
        )
    sharding = matrix.sharding if isinstance(matrix, jax.Array) else None
    sharding = sharding if isinstance(sharding, NamedSharding) else None
    quantizer = _quantizer(kind, sharding, _blocks(kind, matrix.shape[1]))
    found: Any = None
    for layer in range(matrix.shape[0]):  # one at a time: in float32 the whole stack would be twice the base
        found = quantizer(found, matrix, layer)
    codes, scales = found
    return QuantizedMatrix(codes, scales, kind, matrix.dtype)


def _blocks(kind: str, inputs: int) -> int:
    """Blocks of a column, each of which has a scale."""
    return 1 if kind == "int8" else inputs // math.gcd(inputs, NF4_BLOCK)


@functools.cache
def _quantizer(kind: str, sharding: NamedSharding | None, blocks: int) -> Any:
    """A jitted function that adds a layer's codes and scales to those of the stack so far (None: none yet)."""
    shardings = None
    if sharding is not None:
        layers, inputs, outputs = (*sharding.spec, *[None] * 3)[:3]
        axes = (inputs,) if isinstance(inputs, str) else inputs or ()
        ways = math.prod(sharding.mesh.shape[axis] for axis in axes)
        scales = PartitionSpec(layers, None if blocks % ways else inputs, outputs)
        shardings = tuple(NamedSharding(sharding.mesh, spec) for spec in (sharding.spec, scales))

    def with_layer(found: Any, stack: jax.Array, layer: Int[Array, ""]) -> tuple[jax.Array, ...]:
        made = _codes(jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False), kind=kind)
        if found is None:
            found = [jnp.zeros((stack.shape[0], *part.shape), part.dtype) for part in made]
        return tuple(whole.at[layer].set(part) for whole, part in zip(found, made, strict=True))

    return jax.jit(with_layer, donate_argnums=0, out_shardings=shardings)


def _codes(matrix: jax.Array, *, kind: str) -> tuple[jax.Array, jax.Array]:
    inputs, outputs = matrix.shape
    blocks = matrix.astype(jnp.float32).reshape(_blocks(kind, inputs), -1, outputs)
    top = jnp.max(jnp.abs(blocks), axis=-2)
    scales = jnp.where(top > 0, top, 1.0) / (127 if kind == "int8" else 1)  # a column of zeros is not divided by 0
    values = (blocks / scales[:, None, :]).reshape(matrix.shape)
    if kind == "int8":
        return jnp.round(values).astype(jnp.int8), scales
    # The nearest of the 16 values: how many of the middles between neighbours lie below.
    between = (np.array(NF4_VALUES[1:]) + np.array(NF4_VALUES[:-1])) / 2
    # Compared with one middle after the other: a binary search would hold several arrays of the values' size.
    codes = jnp.zeros(values.shape, jnp.uint8)
    for middle in between:
        codes += (values > np.float32(middle)).astype(jnp.uint8)
    codes = codes.reshape(inputs // 2, 2, outputs)
    return codes[:, 0] | (codes[:, 1] << 4), scales


def saved_bytes(config: ModelConfig, kind: str, number_bytes: int) -> int:
    """Bytes that quantisation saves of a base whose numbers take `number_bytes` each, by arithmetic alone."""
    if not kind:
        return 0
    saved = 0
    for name, ((inputs, _), (outputs, _)) in matrix_sizes(config).items():
        if name in SPARSE:  # stays as it is
            continue
        whole = inputs * outputs * number_bytes
        codes = inputs * outputs if kind == "int8" else inputs * outputs // 2
        saved += len(owners(name, config)) * (whole - codes - 4 * _blocks(kind, inputs) * outputs)
    return saved
