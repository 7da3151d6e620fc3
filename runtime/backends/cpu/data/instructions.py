"""The words of a program: what `plan` writes and `executor` reads.

A program is int64 [instructions, WIDTH]; word 0 is the operation, the others are its operands in the order of its list
below: addresses, sizes, strides in bytes, and floats as their bits. Where an operand `rows` stands, 0 means the rows of
the step (M) and 1 the rows whose logits are wanted (R).
"""

from __future__ import annotations

import struct
from typing import Final

WIDTH: Final = 32
"""Words of an instruction."""
INNER, UNIT = 30, 31
"""Words that `runtime.backends.cpu.link` fills: addresses of the unit that runs the instruction, and of one that it
calls."""

EMBED, GATHER, NORM, GATE, MERGE, SELECT, LINEAR, HEADS, ATTEND, FLUSH, RESTORE = range(11)

_INPUT = "x x_stride width out out_stride codes scales shifts group_blocks rows"
_CACHE = "cache pages window_keys window_values"
_PAGE = "cache layers heads pages pages_step page keys keys_step values values_step slot"

OPERANDS: Final[dict[int, tuple[str, ...]]] = {
    operation: tuple(names.split())
    for operation, names in {
        EMBED: "table channels out out_stride",
        GATHER: "x x_stride channels out out_stride",
        NORM: f"{_INPUT} weight eps",
        GATE: _INPUT,
        MERGE: f"{_INPUT} heads dim",
        SELECT: "x x_stride width k_chunk total chosen chosen_stride rows mode b15 upper lower static seed layer"
        " measure hits",
        LINEAR: "codes scales zeros x_codes x_scales x_shifts blocks group_blocks groups tiles bits bias out out_stride"
        " accumulate rows residual residual_scales residual_bits residual_row x x_stride chosen chosen_stride total"
        " codebooks",
        HEADS: f"qkv stride heads kv_heads dim half cos sin q_norm k_norm eps scale {_CACHE}",
        ATTEND: f"qkv stride heads kv_heads dim window {_CACHE} out",
        FLUSH: f"{_PAGE} rest start scratch scratch_step",
        RESTORE: f"{_PAGE} count scratch scratch_step",
    }.items()
}

# Step parameters in the control block, after the words of `runtime.backends.cpu.machine.sync`.
M_ROWS, R_ROWS, RUNS, SPLITS, COMPENSATE = 40, 41, 42, 43, 44
TOKENS, SLOTS, POSITIONS, LOGIT_ROWS, RUN_ROWS, SCRATCH, SCRATCH_STRIDE = 45, 46, 47, 48, 49, 50, 51
PROGRAM, INSTRUCTIONS = 52, 53
"""Address of the program that the next step runs, and its number of instructions."""
DRAFT = 54
"""1: attention reads the upper plane alone where the cache has two."""


def float_bits(value: float) -> int:
    """A float32's bits as a word."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
