"""Runs single instructions of the CPU backend, so that tests exercise the very machine code that models run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.cpu import instructions as op
from runtime.cpu import sync
from runtime.cpu.layout import aligned_zeros
from runtime.cpu.pool import Pool


class Machine:
    """A control block with room for `rows` rows, and a way to run hand-written instructions."""

    def __init__(self, rows: int, *, threads: int = 2, logit_rows: int = 0) -> None:
        self.threads = threads
        self.control = aligned_zeros((sync.CONTROL_WORDS,), np.int64)
        self.inputs = aligned_zeros((5, max(rows, 1) * 2), np.int32)
        self.scratch = aligned_zeros((threads, 1 << 18), np.uint8)
        for word, array in zip(
            (op.TOKENS, op.SLOTS, op.POSITIONS, op.LOGIT_ROWS, op.RUN_ROWS), self.inputs, strict=True
        ):
            self.control[word] = array.ctypes.data
        self.control[op.SCRATCH], self.control[op.SCRATCH_STRIDE] = self.scratch.ctypes.data, self.scratch.strides[0]
        self.control[op.M_ROWS], self.control[op.R_ROWS] = rows, logit_rows
        self.control[op.SPLITS], self.control[op.COMPENSATE] = 1, 1

    def run(self, operation: int, **operands: Any) -> None:
        """Run one instruction; arrays stand for their addresses, floats for their bits, absent operands are 0."""
        program = aligned_zeros((1, op.WIDTH), np.int64)
        program[0, 0] = operation
        for name, value in operands.items():
            if isinstance(value, np.ndarray):
                value = value.ctypes.data
            elif isinstance(value, float):
                value = op.float_bits(value)
            program[0, 1 + op.OPERANDS[operation].index(name)] = value
        Pool(self.control, self.threads).step(program)

    @property
    def failed(self) -> bool:
        return bool(self.control[sync.FAILED])


@pytest.fixture(scope="session")
def machine() -> Callable[..., Machine]:
    """`Machine`, to be made with a number of rows."""
    return Machine
