"""Sizes of packed weights and buffers on the GPU, computed from shapes alone, for the memory plan and the allocations.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from models.recipe import Recipe
from models.rope import table_bytes
from models.spec import MLP_TYPES, QUERIES, STATE_O, STATE_QKV, DeltaSpec, ModelSpec, expert_of
from models.trellis import STATE_BITS
from runtime.kv.states import WAITING

BLOCK = 512
PIECE = 32
"""Input channels of a piece: two per lane."""
RUN = 64
"""Channels that are rotated together."""
LANES = 16
"""Words per output channel, for one block and one word of it."""
WORDS = {2: 2, 3: 3, 4: 4}
"""Words of a block by bits."""
BYTE = 8
"""Bits of codes that are bytes, row by row."""
SHORT = 2
"""Most pieces of a short word."""
EXPERT_WORDS = 32
"""An expert's codes and groups begin at multiples of so many words, 128 bytes."""
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
_PLACE_BYTES = 8
"""Bytes of an expert's place in the table of its layer."""
RUNS_TOGETHER = 4
"""Sequences of a step whose tokens that wait are prepared for a delta rule at the same time. More would need more
memory: 1 MiB each for Qwen3.5 4B."""
CHUNK = 16
"""Rows of a prompt that a delta rule reads together: with 32, registers spilled."""
HALF_BUFFERS = ("inputs", "rotated", "queries", "embedded", "embedded_rotated", "embeddings", "own_tokens")
"""Buffers of float16."""
_NUMBER_BYTES = {"tokens": 1, **dict.fromkeys(HALF_BUFFERS, 2)}
"""Bytes of a number of a buffer; 4 of the others."""
SMALLEST_BLOCK = 32
"""Pairs of a row and one of its experts that a prompt's product takes together, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """Element counts of the buffers of one loaded model."""

    inputs: int  # float16, the input of a linear layer
    rotated: int  # float16, the same rotated; 0 if products don't read it so
    sums: int  # float32, sums of the pieces of such an input, of few rows; 0 unless products read them
    tokens: int  # int8, the same quantized; 0 if products read half precision
    token_sums: int  # int32, the sums of its groups
    token_scales: int  # float32, a scale for each row
    queries: int  # float16, rotated queries
    waiting: int  # float32, what delta rules read of tokens that wait
    mixed: int  # float32, and of a step's rows
    stream: int  # float32, the residual stream
    output: int  # float32, the output of a linear layer, or a few rows of logits
    compensation: int  # float32, the compensation of an output of few rows
    scratch: int  # float32, split results of kernels until they are merged
    kept: int  # float32, an output that is read together with another one's (`is_kept`)
    kept_compensation: int  # float32, its compensation
    embedded: int  # float16, the tokens' embeddings, where every block reads them
    embedded_sums: int  # float32, their sums, of few rows
    embedded_rotated: int  # float16, or these rotated
    embeddings: int  # float16, rows of the embedding table
    own_tokens: int  # float16, embeddings of the blocks' own

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field.name) * _NUMBER_BYTES.get(field.name, 4) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSizes:
    """Element counts of the buffers of a mixture, 32 bits each."""

    pairs: int  # Rows times experts of each, chosen, and again for their shares
    logits: int  # The router's
    order: int  # The pairs of a prompt by expert
    blocks: int  # Three numbers for each block of these
    mixed: int  # What the experts of a prompt's rows add up to

    @property
    def nbytes(self) -> int:
        return 4 * (2 * self.pairs + self.logits + self.order + self.blocks + self.mixed)


def routing_sizes(spec: ModelSpec, rows: int) -> RoutingSizes:
    """The buffers of a model's mixture, which it has, for steps of so many rows."""
    of = spec.mixture
    assert of is not None
    pairs, grouped = rows * of.experts_per_token, rows > SUMMED_ROWS
    return RoutingSizes(
        pairs=pairs,
        logits=rows * of.scores,
        order=pairs if grouped else 0,
        blocks=3 * (pairs // SMALLEST_BLOCK + of.num_experts) if grouped else 0,
        mixed=rows * spec.hidden_size if grouped else 0,
    )


def buffer_sizes(spec: ModelSpec, rows: int, token_group: int | None = None, *, trellis: bool = False) -> BufferSizes:
    """The buffers of a model for steps of up to so many rows, without those of `routing_sizes`.

    `token_group` is channels per sum of INT8 tokens, 0 = the whole row; None if products read half precision, those of
    a `trellis` rotated.
    """
    blocks = range(spec.num_layers)
    names = [name for layer in blocks for name in spec.block_linears(layer, experts=0)]
    shapes = [spec.linear_shape(name) for name in names]
    heads = [spec.heads_of(layer) for layer in blocks]
    widest, longest = max(N for N, _ in shapes), max(K for _, K in shapes)
    token = 0 if token_group is None else token_width(longest, token_group)
    few, concurrent = min(rows, SUMMED_ROWS), min(rows, CONCURRENT_ROWS)
    kept = max((N for name, (N, _) in zip(names, shapes, strict=True) if is_kept(spec, name)), default=0)
    embedded = spec.hidden_size if spec.token_width else 0
    inputs, logits = 0 if spec.delta is None else spec.delta.inputs, spec.vocab_size if spec.has_head else 0
    chunks = 0 if spec.delta is None else rows * chunk_numbers(spec.delta)
    sizes = BufferSizes(
        inputs=rows * longest,
        rotated=rows * PIECE * pieces(longest) if trellis else 0,
        sums=few * pieces(longest) if token_group is None and not trellis else 0,
        tokens=rows * token,
        token_sums=rows * (token // (token_group or max(1, token))),
        token_scales=rows if token else 0,
        queries=rows * max(own.q_width for own in heads),
        waiting=min(rows, RUNS_TOGETHER) * WAITING * inputs,
        mixed=rows * inputs,
        stream=rows * spec.hidden_size,
        output=max(rows * widest, min(rows, LOGIT_ROWS) * logits),
        compensation=max(concurrent * widest, logits),
        scratch=max(SPLIT_ROWS * (max(map(spec.attended_dim, blocks)) + 2), chunks),
        kept=rows * kept,
        kept_compensation=concurrent * kept,
        embedded=rows * embedded,
        embedded_sums=0 if trellis else few * pieces(embedded),
        embedded_rotated=rows * PIECE * pieces(embedded) if trellis else 0,
        embeddings=rows * spec.hidden_size,
        own_tokens=rows * spec.num_layers * spec.token_width,
    )
    if spec.mixture is None:
        return sizes
    read, width, C = spec.mixture.experts_per_token, spec.mixture.width, spec.hidden_size
    pairs, parts = rows * read, rows * read * C if rows > SUMMED_ROWS else 0
    return replace(
        sizes,
        inputs=max(sizes.inputs, pairs * width),
        rotated=max(sizes.rotated, pairs * PIECE * pieces(width)) if trellis else 0,
        sums=0 if trellis else max(sizes.sums, few * read * pieces(width)),
        output=max(sizes.output, spec.mlp_parts * pairs * width, parts),
        compensation=max(sizes.compensation, spec.mlp_parts * concurrent * read * width),
        scratch=max(sizes.scratch, few * read * C),
    )


def is_kept(spec: ModelSpec, name: str) -> bool:
    """Whether the output of a linear layer, `layers.3.down`, is read when that of another one is there, too.

    The stream's part of a gate waits for the tokens', an MLP for the experts beside it, and keys and values for queries
    that are made of a latent. Of an MLP and attention, or a state and attention, side by side, what the first is to
    make of its `gate_up` or `qkv` waits, and then its output.
    """
    if name.endswith(MLP_TYPES if spec.parallel else (STATE_QKV, STATE_O)):
        return True
    if name.endswith(".qkv"):
        return spec.latent is not None and spec.latent.query_rank > 0 and not name.endswith(QUERIES)
    if spec.mixture is not None and spec.mixture.parallel_mlp and name.endswith(".down") and expert_of(name) is None:
        return spec.has_experts(int(name.split(".")[1])) and not name.endswith("inner.down")
    return name.endswith("inner.gate_up")


def buffer_bytes(
    spec: ModelSpec, context: int, rows: int, token_group: int | None = None, *, trellis: bool = False
) -> int:
    """Bytes of buffers and rotary tables, including sampling's temporary ones."""
    found = buffer_sizes(spec, rows, token_group, trellis=trellis).nbytes
    found += table_bytes(spec, context) + DRAW_BYTES * spec.vocab_size
    return found if spec.mixture is None else found + routing_sizes(spec, rows).nbytes


def chunk_numbers(spec: DeltaSpec) -> int:
    """Numbers that say how a row depends on those of its chunk: of each value head two for each of them."""
    return spec.value_heads * 2 * CHUNK


def pieces(K: int) -> int:
    return -(-K // PIECE)


def tail_words(bits: int, left: int, *, trellis: bool = False) -> tuple[int, int]:
    """Whole and short words of the `left` pieces after the last whole block, there for a trellis's states as well."""
    if trellis:
        return (-(-(left * bits + STATE_BITS - bits) // 16) if left else 0), 0
    each = 16 // bits
    last = left % each
    return left // each + (last > SHORT), int(0 < last <= SHORT)


def code_words(shape: tuple[int, int], bits: int, *, trellis: bool = False) -> int:
    """32-bit words of the codes of a matrix [N, K] on the device."""
    N, K = shape
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    whole, short = tail_words(bits, left, trellis=trellis)
    return (blocks * WORDS[bits] + whole) * N * LANES + short * N * LANES // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSizes:
    """32-bit words of an expert's record, both multiples of `EXPERT_WORDS`."""

    code_words: int  # Of its codes, behind which its groups begin, or a trellis's scales
    words: int  # Of all of it

    @property
    def nbytes(self) -> int:
        return 4 * self.words


def record_sizes(shape: tuple[int, int], bits: int, group_size: int, *, trellis: bool = False) -> RecordSizes:
    """The record of an expert's matrix [N, K] with uniform groups, or of a trellis."""
    N, K = shape
    parts = code_words(shape, bits, trellis=trellis), -(-N // 2) if trellis else N * -(-K // group_size)
    codes, behind = (-(-words // EXPERT_WORDS) * EXPERT_WORDS for words in parts)
    return RecordSizes(code_words=codes, words=codes + behind)


def _record_bytes(spec: ModelSpec, recipe: Recipe, name: str) -> int:
    """Bytes of the record of an expert's matrix."""
    shape, bits = spec.linear_shape(name), recipe.layer_bits(name)
    return record_sizes(shape, bits, recipe.group_of(shape[1], name), trellis=recipe.trellis).nbytes


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


def linear_bytes(shape: tuple[int, int], bits: int, group_size: int, *, bias: bool, trellis: bool = False) -> int:
    """Bytes of a linear layer's weights [N, K] on the device; group_size 0: with a codebook, or of a trellis."""
    N, K = shape
    if bits == BYTE:
        return N * K + 2 * N * (K // group_size) + (4 * N if bias else 0)
    codes = 4 * code_words(shape, bits, trellis=trellis)
    scales = 4 * N * -(-K // group_size) if group_size else 2 * N << (0 if trellis else bits)
    return codes + scales + (4 * N if bias else 0)


def weight_bytes(spec: ModelSpec, recipe: Recipe, *, compensated: bool) -> int:
    """Bytes of a model's weights on the device: linear layers, routers, norms, and scales of residuals in use."""
    total = 4 * sum(width for layer in range(spec.num_layers) for width in spec.block_vectors(layer).values())
    total += 4 * spec.hidden_size
    total += 4 * sum(scores * C for layer in range(spec.num_layers) for scores, C in spec.routers(layer).values())
    for name in spec.linear_names(experts=1):
        shape, own = spec.linear_shape(name), 0
        if recipe.per_token:
            own += w4a8_bytes(shape, recipe.group_size) + (4 * shape[0] if spec.has_bias(name) else 0)
        elif expert_of(name) is not None and not recipe.codebook:
            own += _record_bytes(spec, recipe, name) + _PLACE_BYTES
            own += 4 * shape[0] if spec.has_bias(name) else 0
        else:
            group_size = recipe.group_of(shape[1], name) if recipe.uniform else 0
            own += linear_bytes(
                shape, recipe.layer_bits(name), group_size, bias=spec.has_bias(name), trellis=recipe.trellis
            )
        own += 2 * shape[0] if compensated and recipe.residual_bits not in (0, 16) else 0
        total += own * spec.alike(name)
    return total


def expert_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """Bytes of one expert's records in all blocks; 0 where experts can't be elsewhere than on the device."""
    if spec.mixture is None or recipe.codebook or recipe.per_token:
        return 0
    names = [name for name in spec.linear_names(experts=1) if expert_of(name) == 0]
    return sum(_record_bytes(spec, recipe, name) for name in names)
