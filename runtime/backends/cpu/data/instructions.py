"""Instructions of a program: written by `plan`, read by the units, each declared once with named fields.

A program is int64 [instructions, WIDTH]: an instruction is its `Header`, followed by the fields of its class here.
Addresses are those of arrays; strides and steps are in bytes. Compiled code reads an instruction through its view:
`linear = linear_at(i)`, then `linear.weights.codes`.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from models.spec import Activation
from runtime.backends.cpu.data.records import Routes, record_of

WIDTH: Final = 56
"""Words of an instruction."""
SELECT_APPROX, SELECT_EXACT, SELECT_STATIC, SELECT_RANDOM = 0, 1, 2, 3
"""Modes of a SELECT: the paper's approximation; exact; static; random."""
BYTE: Final = 8
"""Bits of codes that are bytes already."""
FIVE: Final = 5
SIX: Final = 6
"""Bits of codes that are stored in two planes, of four bits and of one or two."""
UNIFORM, MINIMUMS, TWO_LEVELS, FLOATS, FLOATS_8, CODEBOOK, TRELLIS, PER_TOKEN = range(8)
"""Forms of a matrix (`runtime.backends.cpu.tiles`); the last is multiplied in whole numbers."""
EXACT_KINDS: Final = ("f16", "bf16", "f32")
"""Types of full-precision weights, by number."""
WHOLE_BITS: Final = 4
"""Bits of residuals that are tiled like weights."""
BESIDE: Final = -1
"""Number of parts of a SELECT that runs inside the next instruction, see `runtime.backends.cpu.units.products`."""


class Header(NamedTuple):
    """The header of every instruction."""

    operation: int  # index in `OPERATIONS`
    unit: int  # address of the unit that runs it
    inner: int  # address of a unit that this one calls; 0 = none
    scratch: int  # bytes of scratch per thread
    parts: int
    """Number of parts in a step of one row; 0: as many as attention's work items; `BESIDE`: the next instruction runs
    it."""
    parts_of_many: int  # the same in a step of several rows


class Matrix(NamedTuple):
    """Rows in a buffer."""

    at: int  # address of the first row
    stride: int  # bytes between rows


class Quantized(NamedTuple):
    """Rows of INT8 activations, in the layout of `runtime.backends.cpu.kernels.activation`."""

    codes: int  # address of int8
    scales: int  # address of float32
    shifts: int  # address of float32
    sums: int = 0  # address of int32; 0: not needed


class Embed(NamedTuple):
    """Write the embeddings of a step's tokens."""

    table: int  # address of float16 [V, C]
    stride: int  # bytes between the rows of consecutive tokens
    channels: int  # C
    out: Matrix  # float32


class Gather(NamedTuple):
    """Copy the rows whose logits are wanted."""

    x: Matrix  # float32, all rows
    channels: int  # C
    out: Matrix  # float32


class Check(NamedTuple):
    """Mark the step as failed if a wanted row is not finite; then cap it."""

    x: Matrix  # float32, the rows whose logits are wanted
    channels: int  # A multiple of 16
    cap: float = 0.0  # soft cap of the logits; 0 = none


class Input(NamedTuple):
    """Input of a matrix product, as written by the instructions before it: rows in float32 and in INT8."""

    width: int  # K
    wanted: bool  # whether these are only the rows whose logits are wanted, rather than all rows of the step
    out: Matrix  # float32, zero-padded to whole blocks
    rounded: Quantized  # the same in INT8
    group_blocks: int  # blocks of 32 channels that share a scale; 0: half a block does
    per_token: bool = False  # whether all groups of a row share a scale
    rotated: bool = False  # whether the INT8 rows are rotated group by group (`models.trellis`)


class Pick(NamedTuple):
    """Copy some channels side by side, and quantize them. Skipped where rows are not compensated."""

    x: Matrix  # float32
    channels: int  # address of int32 [K], K = `to.width`
    to: Input  # the output


class Norm(NamedTuple):
    """RMSNorm, and quantization of its output."""

    x: Matrix  # float32
    to: Input  # the output
    weight: int  # address of float32, zero-padded to whole blocks; 0: no norm, x itself is quantized
    eps: float  # added to the mean square


class NormInplace(NamedTuple):
    """RMSNorm of rows that stay in float32: added to others, or in their place."""

    x: Matrix  # float32
    width: int  # channels
    weight: int  # address of float32 [width]
    eps: float  # added to the mean square
    out: Matrix  # float32; may be x
    accumulate: bool  # whether the result is added to the contents of `out`
    scale: int = 0  # address of float32, by which `out` is multiplied at the end; 0: it is not


FORMS: Final = {activation: number for number, activation in enumerate(get_args(Activation))}
"""Activations of MLPs, by number."""


class Gate(NamedTuple):
    """F(gate) * up, or f(up) of an MLP without a gate, and quantization of its output."""

    x: Matrix  # float32: gate, then up; or up alone
    to: Input  # the output
    form: int  # which f: one of `FORMS`
    limit: float = 0.0  # most of gate and up of gpt-oss's
    slopes: int = 0  # address of float32 [2], of xIELU's


class Merge(NamedTuple):
    """Join the splits of attention, and quantize the result."""

    partial: int  # address of ATTEND's output
    to: Input  # the output
    heads: int  # H
    dim: int  # D
    given: int  # channels of each head, the first ones, that are written
    gate: Matrix = Matrix(0, 0)  # float32, by whose sigmoid each channel is multiplied; at 0: none
    sinks: int = 0  # address of float32 [H], scores that take a share of each head's attention; 0 = none
    softplus: int = 0  # whether it is their softplus instead
    each: int = 1  # and of how many channels


class Border(NamedTuple):
    """Buckets of approximate selection (`runtime.backends.operations.channels.Buckets`)."""

    b15: float  # see there, and so below
    upper: float
    lower: float


class Select(NamedTuple):
    """Choose the salient channels of every chunk of the rows."""

    x: Matrix  # float32
    width: int  # K
    wanted: bool  # as of `Input`
    k_chunk: int  # channels of a whole chunk
    total: int  # channels of a row
    chosen: Matrix  # int32, written
    mode: int  # mode: `SELECT_APPROX` or another
    border: Border  # parameters of the approximate mode
    static: int  # address of int32 [total], of the static mode; of int32 [E, total] by slot
    seed: int  # seed of the random mode
    layer: int  # number of the matrix, of the random mode
    measure: bool  # whether recall is measured
    hits: int  # address of float32 [rows], where each row's recall is accumulated
    routes: Routes = Routes()
    """Which rows go to which experts, if the rows are by slot (`runtime.backends.cpu.data.records`)."""
    chosen_in: int = -1  # number of the turn in which the channels were chosen, if that is part of the next instruction


class Weights(NamedTuple):
    """A tiled matrix (`runtime.backends.cpu.tiles`): addresses and sizes."""

    codes: int  # address of the first tile
    scales: int  # float16
    zeros: int  # uint8; 0 with codebooks and at 8 bits, a line of zeros with a trellis; with minimums, their negatives
    codebooks: int  # int8; 0 where the matrix is uniform
    bits: int  # 3, 4, 5, 6 or 8; 2 as well with a trellis
    tiles: int  # number of tiles of 16 output channels
    blocks: int  # number of blocks of 32 input channels
    groups: int  # groups of the activations, and of uniform weights
    group_blocks: int  # blocks of a group; 0: two groups in a block
    group_scales: int = 0  # uint8, of the form `PER_TOKEN`, whose `zeros` include this factor; 0: other forms
    form: int = UNIFORM  # `UNIFORM` or another


class Residual(NamedTuple):
    """A matrix's residuals, in canonical packing."""

    codes: int = 0  # address
    scales: int = 0  # address of float16 [N padded to 16]; 0 for float16 residuals whose channels are chosen per row
    bits: int = 0  # 2, 4, 8 or 16
    stride: int = 0  # bytes between the rows of consecutive input channels
    rows: int = 0  # K, rows


class Whole(NamedTuple):
    """Residuals of all channels of a matrix, or of those that prompt rows share, as a tiled 4-bit matrix: addresses."""

    codes: int = 0  # address of the first tile; 0: none
    scales: int = 0  # float16
    zeros: int = 0  # uint8
    blocks: int = 0  # of 32 channels


class Exact(NamedTuple):
    """A matrix in its source's own precision (`runtime.backends.cpu.tiles.tile_exact`)."""

    weights: int = 0  # address of the first tile; 0: none
    kind: int = 0  # one of `EXACT_KINDS`


class Linear(NamedTuple):
    """A matrix product, and the compensation of its outputs."""

    weights: Weights  # the matrix
    x: Quantized  # the quantized activations
    wanted: bool  # as of `Input`
    out: Matrix  # float32
    bias: int  # address of float32 [N padded to 16]; 0 = none
    accumulate: bool  # whether the product is added to the contents of `out`
    total: int = 0  # number of compensated channels; 0 = none
    residual: Residual = Residual()  # of the matrix, if it is compensated, as all fields below
    values: Matrix = Matrix(0, 0)  # the activations in float32
    chosen: Matrix = Matrix(0, 0)  # int32, the channels
    kept: int = 0  # as in `Panel`, if all rows share their compensated channels; 0: each row has its own
    whole: Whole = Whole()  # residuals, if each row is compensated by all of these
    plain: Quantized = Quantized(0, 0, 0)  # the activations that those of all rows meet: `x`, but never rotated
    exact: Exact = Exact()  # what takes the matrix's place where rows are compensated


class Panel(NamedTuple):
    """A matrix product of prompt rows, with residuals added to the weights (`runtime.backends.operations.panel`)."""

    weights: Weights  # the matrix
    x: Quantized  # the quantized activations
    out: Matrix  # float32
    bias: int  # address of float32 [N padded to 16]; 0 = none
    accumulate: bool  # whether the product is added to the contents of `out`
    residual: Residual  # of the matrix; with scales even if it holds float16 values
    kept: int  # address of uint8 [K padded to 32]: 255 for a compensated input channel, otherwise 0


class Score(NamedTuple):
    """Compute the logits of a router."""

    x: Matrix  # float32, all rows
    channels: int  # C, padded to whole blocks
    weight: int  # address of float32 [scores, C padded]
    scores: int  # rows of the router: one for each expert to choose from, and one for the share of shared experts
    out: Matrix  # float32
    bias: int = 0  # address of float32 [scores]; 0: none


class Route(NamedTuple):
    """Choose the experts of each row, and group the rows by expert."""

    logits: Matrix  # float32
    experts: int  # E, experts of the block
    chosen: int  # experts of a row
    shared: int  # those of either that every row goes to: the last ones
    gated: bool  # whether their share is the sigmoid of the last logit; else it is 1
    sigmoids: bool  # whether scores are sigmoids of the logits; else they are their softmax
    correction: int
    """Address of float32 [experts that are chosen from], added to scores for the choice; 0: there is none."""
    scale: float  # factor of the shares of those that are chosen
    normalized: bool  # whether the shares of the others add up to 1
    chosen_at: int  # address of int64 [rows, chosen], written
    shares_at: int  # address of float32 [rows, chosen], written
    to: Routes  # written


class Spread(NamedTuple):
    """Quantize the rows that each expert reads, in the order of experts."""

    x: Matrix  # float32, all rows
    routes: Routes  # which rows go where
    to: Input  # the output; of `out` and `wanted` nothing is used
    by_slot: bool = False  # whether `x` is in the order of experts already


class GateExperts(NamedTuple):
    """The gate of GATE times an expert's share, and quantization of the result."""

    x: Matrix  # float32, by slot: gate, then up; or up alone
    routes: Routes  # which rows go where
    to: Input  # the output, by slot
    form: int  # as of `Gate`, and so the next two
    limit: float = 0.0
    slopes: int = 0


class ExpertSizes(NamedTuple):
    """What the matrices of a block's experts have in common."""

    bits: int  # as of `Weights`, and so the next five
    tiles: int
    blocks: int
    groups: int
    group_blocks: int
    form: int = UNIFORM
    residual_bits: int = 0  # as of `Residual`, and so the next two
    stride: int = 0
    rows: int = 0


class Experts(NamedTuple):
    """Products of rows with the matrices of their experts, and the compensation of the outputs."""

    table: int  # address of `Expert` for each of the block's experts
    sizes: ExpertSizes  # of each
    routes: Routes  # which rows go where
    x: Quantized  # the quantized activations, by slot; a single row's once, if `by_row`
    plain: Quantized  # those that residuals meet if all rows share their compensated channels
    by_row: bool  # whether all experts of a row read the same activations
    out: Matrix  # float32, by slot; if there is a `sum`, those of one segment
    sum: Matrix = Matrix(0, 0)  # float32, the rows that the products are added to; 0: none
    fresh: bool = False  # whether these are zeros at first
    total: int = 0  # number of channels that each row is compensated by; 0 = none
    values: Matrix = Matrix(0, 0)  # the activations in float32, by row if `by_row`, otherwise by slot
    chosen: Matrix = Matrix(0, 0)  # int32, the channels, likewise
    kept: bool = False  # whether all rows share their compensated channels


class Stored(NamedTuple):
    """A layer of the cache: addresses."""

    cache: int  # address of the cache's description (`runtime.backends.cpu.data.pages`)
    pages: int  # address of its records
    keys: int  # address of the keys in its windows
    values: int  # address of the values in its windows


class Heads(NamedTuple):
    """Normalize, rotate and turn queries and keys (or rotate first), scale queries, store keys and values."""

    q: Matrix  # float32
    kv: Matrix  # float32, of keys, then values
    heads: int  # H
    kv_heads: int  # H_kv
    dim: int  # D
    half: int  # rotary_dim / 2
    cos: int  # address of float32 [context, half]
    sin: int  # likewise
    q_norm: int  # address of float32 [D]; 0 = none
    k_norm: int  # likewise
    eps: float  # of the norms
    scale: float  # of the queries
    stored: Stored  # destination of keys and values
    reflection: int = 0
    """Address of float32 [H_kv, D], see `runtime.kv.basis.KeyBasis`; 0: queries and keys are not turned."""
    mean: int = 0  # address of float32 [H_kv, D], likewise
    norm_last: bool = False  # whether the norms come behind the rotation
    growth: int = 0  # address of float32 [context], factors of queries by their positions; 0 = none
    v_norm: int = 0  # address of float32 [D], for values; 0 = none
    latent: int = 0  # R, channels at the end of a key, and at the beginning of a value, that pass a norm alone; 0: all
    alone: bool = False  # whether there are queries alone, for a cache that is another layer's


class Attend(NamedTuple):
    """Attention of a step's rows."""

    q: Matrix  # float32, after HEADS
    heads: int  # H
    kv_heads: int  # H_kv
    dim: int  # D
    window: int  # visible tokens, including the query's own; 0 = all
    rows: int  # most rows of a run
    stored: Stored  # the keys and values
    out: int  # address of the partial results: float32 [rows, H, splits, D padded to 16 + 16]
    exact: int  # address of int32: whether drafts read both planes of the pages, too
    cap: float = 0.0  # soft cap of the scores; 0 = none


class State(NamedTuple):
    """A layer's states (`runtime.kv.states`): addresses."""

    recent: int  # address of float32 [slots, ring, inputs]
    ring: int  # recent tokens of a slot
    inputs: int  # numbers kept of each recent token, a multiple of 16
    matrices: int  # address of float32 [slots, Hv, Dk, Dv padded to 16]
    absorbed: int  # address of int32 [slots]: tokens that matrices have absorbed before the step
    absorbs: int  # address of int32 [slots]: whether they absorb the tokens up to the step (1), and its rows (2)


class Mix(NamedTuple):
    """What a delta rule or Mamba-2 reads of a step's rows and of the tokens before that are not absorbed.

    A row is the channels of q, k and v after a short convolution and SiLU, padded to 16; beta of each value head,
    padded likewise; and the decay of each.
    """

    x: Matrix  # float32: what enters the state of the step's rows
    out: Matrix  # float32, of the step's rows
    before: Matrix  # float32, of the tokens before: `waiting` rows for each slot
    waiting: int  # most tokens of a slot that are not absorbed
    channels: int  # channels of q, k and v
    keys: int  # channels of q, which tokens before do not need
    heads: int  # value heads
    taps: int  # tokens that the convolution sees, its own included
    weight: int  # address of float32 [taps, channels padded to 16]
    decay: int  # address of float32 [heads padded]
    dt: int  # likewise
    bias: int  # address of float32 [channels padded]; 0 = none
    mamba: int  # whether beta is the step that makes the decay, too
    most: float  # of beta
    state: State  # the tokens before, which the rows join


class DeltaRule(NamedTuple):
    """The gated delta rule of a step's rows, or Mamba-2."""

    x: Matrix  # `Mix.out`
    before: Matrix  # `Mix.before`
    waiting: int  # as there, and so below
    out: Matrix  # float32 [heads * dim]
    channels: int
    key_heads: int  # query heads, and key heads
    heads: int
    key_dim: int  # dk
    dim: int  # dv
    scale: float  # of queries
    rows: int  # most rows of a step, and of tokens before it
    skip: int  # address of float32 [heads padded], Mamba-2's D; 0 = it is a delta rule
    state: State  # the matrices


class Finish(NamedTuple):
    """RMSNorm of each head's outputs, times silu(gate), and quantization; in Mamba-2 the gate comes first."""

    x: Matrix  # float32, overwritten
    gate: Matrix  # float32
    to: Input  # the output
    gain: int  # address of float32 [dim], weight of the norm; in Mamba-2 [heads * dim], or 0: there is none
    heads: int  # number of heads, or of groups of them with a norm
    dim: int  # dv, or the width of a group
    eps: float  # of the norm
    mamba: int


class Convolve(NamedTuple):
    """The gated short convolution of a step's rows, and quantization of its output."""

    x: Matrix  # float32: the gate before, the gate after, and the input
    to: Input  # the output
    weight: int  # address of float32 [taps, C padded to whole blocks]
    bias: int  # address of float32 [C padded]; 0 = none
    taps: int  # tokens that it sees, its own included
    state: State  # the tokens before, which the rows join


class Level(NamedTuple):
    """Rows times a number and, where there are others, what makes them as large."""

    x: Matrix  # float32
    like: Matrix  # float32, whose root of the mean square in each row it gets; at 0: none
    width: int  # C
    padded: int  # to whole blocks
    least: float  # of the mean square of x
    scale: float
    out: Matrix  # float32
    accumulate: bool  # whether the result is added to the contents of `out`


class Streams(NamedTuple):
    """What streams take from each other, or of how a block changed the first; in place."""

    x: Matrix  # float32: streams side by side, each padded to whole blocks
    first: Matrix  # float32, the first one in front of the block; written unless it corrects
    streams: int  # S
    width: int  # C
    padded: int  # to whole blocks
    eps: float  # of the norm of what the router reads
    router: int  # address of float32 [S, C padded], times the weight of that norm
    weight: int  # address of float32 [S² or S, S]
    corrects: bool


class Cut(NamedTuple):
    """Cut gates at a share of their distribution, in place."""

    x: Matrix  # float32
    width: int  # channels
    deviations: float  # where they end, in standard deviations above their mean


class Page(NamedTuple):
    """A slot's window, and a page in all layers."""

    cache: int  # address of the cache's description
    layers: int  # number of layers
    heads: int  # H_kv
    pages: Matrix  # records, layer by layer
    number: int  # the page
    keys: Matrix  # keys in windows, layer by layer
    values: Matrix  # values in windows, layer by layer
    slot: int  # the window


class Flush(NamedTuple):
    """Flush a page: cut it off a window and quantize it."""

    page: Page  # which
    rest: int  # tokens that remain in the window
    start: int  # address of float32 [rank, D padded], the start matrix of GEAR's iteration


class Restore(NamedTuple):
    """Write a page's first tokens, dequantized, to the front of a window."""

    page: Page  # which
    tokens: int  # number of tokens


Instruction = (
    Embed
    | Gather
    | Pick
    | Check
    | Norm
    | NormInplace
    | Gate
    | Merge
    | Select
    | Linear
    | Panel
    | Heads
    | Attend
    | Flush
    | Restore
) | (Score | Route | Spread | GateExperts | Experts | Convolve | Mix | DeltaRule | Finish | Level | Streams | Cut)
OPERATIONS: Final[tuple[type[Instruction], ...]] = get_args(Instruction)
"""By number."""
HEADER: Final = record_of(Header)
"""Dtype of the header."""
RECORDS: Final = {operation: record_of(operation) for operation in OPERATIONS}
"""Dtype of each instruction's fields."""
assert HEADER.itemsize + max(record.itemsize for record in RECORDS.values()) <= 8 * WIDTH
_SELECT_FIELDS = RECORDS[Select].fields
assert _SELECT_FIELDS is not None
CHOSEN_IN: Final = HEADER.itemsize + int(_SELECT_FIELDS["chosen_in"][1])
"""Byte offset of `chosen_in` within a SELECT, the word through which threads communicate."""


def header_of(words: npt.NDArray[np.int64]) -> Any:
    """The header of an instruction, int64 [WIDTH], as a record."""
    return words[: HEADER.itemsize // 8].view(HEADER)[0]


def headers_of(program: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The headers of all instructions, int64 [instructions, WIDTH], as records."""
    return program[:, : HEADER.itemsize // 8].view(HEADER)[:, 0]


def write(words: npt.NDArray[np.int64], instruction: Instruction) -> None:
    """Write an instruction into its words, int64 [WIDTH]; clears the link."""
    record = RECORDS[type(instruction)]
    words[:] = 0
    header_of(words)["operation"] = OPERATIONS.index(type(instruction))
    _body(words, record)[0] = instruction


def read(words: npt.NDArray[np.int64]) -> Instruction:
    """Read an instruction written by `write`."""
    operation = OPERATIONS[int(header_of(words)["operation"])]
    values: Instruction = _named(operation, _body(words, RECORDS[operation])[0])
    return values


def _body(words: npt.NDArray[np.int64], record: np.dtype[Any]) -> npt.NDArray[Any]:
    start = HEADER.itemsize // 8
    return words[start : start + record.itemsize // 8].view(record)


_hints = functools.cache(get_type_hints)


def _named(declared: Any, values: Any) -> Any:
    """A record's values as its NamedTuple."""
    hints = _hints(declared)
    return declared(*(_named(hints[n], values[n]) if values.dtype[n].fields else values[n].item() for n in hints))
