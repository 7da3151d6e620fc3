"""Sizes of packed weights and buffers on the GPU, computed from shapes alone, for the memory plan and the allocations.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.recipe import Recipe
from models.rope import table_bytes
from models.spec import ModelSpec

NO_EXPERTS = "the GPU backend does not run mixtures of experts; the CPU backend does"
"""Why a model with experts is refused."""

BLOCK = 512
"""Input channels of a block."""
PIECE = 32
"""Input channels of a piece: two per lane."""
LANES = 16
"""Words per output channel, for one block and one word of it."""
WORDS = {3: 3, 4: 4}
"""Words of a block by bits."""
SHORT = 2
"""Most pieces of a short word."""
CONCURRENT_ROWS = 8
"""Most rows of a step (a decoded token or a few drafted ones) whose compensation runs concurrently with the product.
For more rows, it follows the product and is added in place, without extra memory."""
COPIED_BYTES = 32 << 20
"""Most bytes of residuals that several rows share: 8 rows of Llama 3 8B's widest layer at k_chunk 64 take 28 MiB."""
SPLIT_ROWS = 16384
"""Most split rows of attention stored until they are merged: query heads times rows times splits."""
LOGIT_ROWS = 16
"""Most rows of logits that buffers hold; for more, which only evaluations want, a step allocates memory."""
SUMMED_ROWS = 16
"""Rows of a step whose inputs come with the sums of their pieces, for products of few rows."""
DRAW_BYTES = 48
"""Temporary bytes per vocabulary token for sampling: weights, their order and sums."""
_BLOCK_KINDS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """Element counts of the buffers of one loaded model."""

    inputs: int
    """float16, the input of a linear layer."""
    sums: int
    """float32, sums of the pieces of such an input, of few rows."""
    tokens: int
    """int8, the same quantized; 0 if products read half precision."""
    token_sums: int
    """int32, the sums of its groups."""
    token_scales: int
    """float32, a scale for each row."""
    queries: int
    """float16, rotated queries."""
    stream: int
    """float32, the residual stream."""
    output: int
    """float32, the output of a linear layer, or a few rows of logits."""
    compensation: int
    """float32, the compensation of an output of few rows."""
    scratch: int
    """float32, split results of kernels until they are merged."""

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
        token_group: Channels per sum of INT8 tokens, 0 = the whole row; None if products read half precision.
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
        output=max(rows * widest, min(rows, LOGIT_ROWS) * spec.vocab_size),
        compensation=max(min(rows, CONCURRENT_ROWS) * widest, spec.vocab_size),
        scratch=SPLIT_ROWS * (spec.head_dim + 2),
    )


def buffer_bytes(spec: ModelSpec, context: int, rows: int, token_group: int | None = None) -> int:
    """Bytes of buffers and rotary tables, including sampling's temporary ones."""
    return buffer_sizes(spec, rows, token_group).nbytes + table_bytes(spec, context) + DRAW_BYTES * spec.vocab_size


def pieces(K: int) -> int:
    """Pieces of a number of input channels."""
    return -(-K // PIECE)


def tail_words(bits: int, left: int) -> tuple[int, int]:
    """Whole and short words of the `left` pieces after the last whole block."""
    each = 16 // bits
    last = left % each
    return left // each + (last > SHORT), int(0 < last <= SHORT)


def code_words(shape: tuple[int, int], bits: int) -> int:
    """32-bit words of the codes of a matrix [N, K] on the device."""
    N, K = shape
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    whole, short = tail_words(bits, left)
    return (blocks * WORDS[bits] + whole) * N * LANES + short * N * LANES // 2


def half_of(group_size: int) -> int:
    """Channels of a W4A8 operand, H, by the channels of a group; 0 = no groups."""
    return 64 if group_size == 0 else min(64, group_size // 2)


def token_width(K: int, group_size: int) -> int:
    """Codes of an INT8 token of K channels, padded to whole groups or blocks."""
    each = group_size or 2 * half_of(0)
    return -(-K // each) * each


def w4a8_bytes(shape: tuple[int, int], group_size: int) -> int:
    """Bytes of a W4A8 matrix without its bias."""
    N, K = shape
    groups = -(-K // group_size) if group_size else 1
    return N * (token_width(K, group_size) // 2 + 2 + 2 * groups)


def linear_bytes(shape: tuple[int, int], bits: int, group_size: int, *, bias: bool) -> int:
    """Bytes of a linear layer's weights on the device.

    Args:
        shape: (N, K).
        bits: 3 or 4.
        group_size: Input channels per scale; 0 with a codebook.
        bias: Whether there is a bias.
    """
    N, K = shape
    codes = 4 * code_words(shape, bits)
    scales = 4 * N * -(-K // group_size) if group_size else 2 * N << bits
    return codes + scales + (4 * N if bias else 0)


def weight_bytes(spec: ModelSpec, recipe: Recipe, *, compensated: bool) -> int:
    """Bytes of a model's weights on the device: linear layers, norms, and the scales of residuals that are used."""
    total = 4 * sum(width for layer in range(spec.num_layers) for width in spec.block_vectors(layer).values())
    total += 4 * spec.hidden_size
    for name in spec.linear_names():
        shape = spec.linear_shape(name)
        if recipe.per_token:
            total += w4a8_bytes(shape, recipe.group_size) + (4 * shape[0] if spec.has_bias(name) else 0)
        else:
            group_size = 0 if recipe.codebook else recipe.group_size
            total += linear_bytes(shape, recipe.layer_bits(name), group_size, bias=spec.has_bias(name))
        total += 2 * shape[0] if compensated and recipe.residual_bits not in (0, 16) else 0
    return total
