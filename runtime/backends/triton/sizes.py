"""What the GPU backend allocates beside weights and cache, from shapes alone: the memory plan and the buffers agree.

Importing this needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.recipe import Recipe
from models.spec import ModelSpec
from runtime.backends.triton.words import code_words, pieces, token_width, whole_bytes
from runtime.memory import table_bytes
from runtime.operations.channels import layer_kind

BESIDE_ROWS = 8
"""Rows of a step, a decoded token or a few drafted ones, whose compensation runs beside the product. Of more rows, it
follows the product and is added in place, so that it takes no memory."""
SPLIT_ROWS = 16384
"""Rows of attention's splits that are kept until they are merged, at most: query heads times rows times splits."""
SUMMED_ROWS = 16
"""Rows of a step whose inputs have the sums of their pieces beside them, for products of few rows."""
DRAW_BYTES = 48
"""Bytes for each token of the vocabulary that drawing one takes while it lasts: weights, their order and sums."""
_BLOCK_KINDS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """Numbers of values of the buffers of one loaded model."""

    inputs: int
    """float16, the input of a linear layer."""
    sums: int
    """float32, sums of the pieces of such an input, of few rows."""
    tokens: int
    """int8, the same rounded; 0 where products read half precision."""
    token_sums: int
    """int32, the sums of its groups."""
    token_scales: int
    """float32, a scale for each row."""
    queries: int
    """float16, rotated queries."""
    stream: int
    """float32, the residual stream."""
    output: int
    """float32, the output of a linear layer, or one row of logits."""
    compensation: int
    """float32, the compensation of an output of few rows."""
    scratch: int
    """float32, what kernels keep until they merge it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        bytes_2 = self.inputs + self.queries
        bytes_4 = self.sums + self.token_sums + self.token_scales + self.stream + self.output + self.compensation
        return self.tokens + 2 * bytes_2 + 4 * (bytes_4 + self.scratch)


def buffer_sizes(spec: ModelSpec, rows: int, token_group: int | None = None) -> BufferSizes:
    """The buffers of a model.

    Args:
        spec: Its architecture.
        rows: Most rows of a step.
        token_group: Channels of a sum of INT8 tokens, 0 = all of a row; None where products read half precision.
    """
    shapes = [spec.linear_shape(kind) for kind in _BLOCK_KINDS]
    widest = max(N for N, _ in shapes)
    longest = max(K for _, K in shapes)
    token = 0 if token_group is None else token_width(longest, token_group)
    return BufferSizes(
        inputs=rows * longest,
        sums=min(rows, SUMMED_ROWS) * pieces(longest) if token_group is None else 0,
        tokens=rows * token,
        token_sums=rows * (token // (token_group or max(1, token))),
        token_scales=rows if token else 0,
        queries=rows * spec.q_width,
        stream=rows * spec.hidden_size,
        output=max(rows * widest, spec.vocab_size),
        compensation=max(min(rows, BESIDE_ROWS) * widest, spec.vocab_size),
        scratch=SPLIT_ROWS * (spec.head_dim + 2),
    )


def buffer_bytes(spec: ModelSpec, context: int, rows: int, token_group: int | None = None) -> int:
    """Bytes of buffers and rotary tables, and of what a draw takes for a moment."""
    return buffer_sizes(spec, rows, token_group).nbytes + table_bytes(spec, context) + DRAW_BYTES * spec.vocab_size


def linear_bytes(shape: tuple[int, int], bits: int, group_size: int, *, bias: bool) -> int:
    """Bytes of a linear layer's weights on the device.

    Args:
        shape: (N, K).
        bits: 3 or 4.
        group_size: Input channels that share a scale; 0 with a codebook.
        bias: Whether there is a bias.
    """
    N, K = shape
    codes = 4 * code_words(shape, bits)
    scales = 4 * N * -(-K // group_size) if group_size else 2 * N << bits
    return codes + scales + (4 * N if bias else 0)


def weight_bytes(spec: ModelSpec, recipe: Recipe, *, compensated: bool) -> int:
    """Bytes of a model's weights on the device: linear layers, norms, and the scales of residuals that are used."""
    total = 4 * sum(width for layer in range(spec.num_layers) for width in spec.block_norms(layer).values())
    total += 4 * spec.hidden_size
    for name in spec.linear_names():
        shape = spec.linear_shape(layer_kind(name))
        if recipe.per_token:
            total += whole_bytes(shape, recipe.group_size) + (4 * shape[0] if spec.has_bias(name) else 0)
        else:
            group_size = 0 if recipe.codebook else recipe.group_size
            total += linear_bytes(shape, recipe.layer_bits(name), group_size, bias=spec.has_bias(name))
        total += 2 * shape[0] if compensated and recipe.residual_bits not in (0, 16) else 0
    return total
