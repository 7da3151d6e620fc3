"""Runs single instructions of the CPU backend, and the buffers that they read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import CONTROL_WORDS, FAILED, PIECE, padded, parameters_of
from runtime.backends.cpu.kernels.activation import code_bytes, in_registers, row_block
from runtime.backends.cpu.link import link, most_scratch
from runtime.backends.cpu.pool import Pool
from runtime.backends.operations.panel import residual_scales
from tests.guarded import aligned_zeros

GUARD = 256
"""Bytes behind a thread's scratch that no instruction may touch."""


class Machine:
    """A control block with room for `rows` rows, and a way to run hand-written instructions."""

    def __init__(self, rows: int, *, threads: int = 2, logit_rows: int = 0) -> None:
        self.threads = threads
        self.control = aligned_zeros((CONTROL_WORDS,), np.int64)
        self.inputs = aligned_zeros((5, max(rows, 1) * 2), np.int32)
        self.step = parameters_of(self.control)
        for name, array in zip(("tokens", "slots", "positions", "logit_rows", "run_rows"), self.inputs, strict=True):
            self.step[name] = array.ctypes.data
        self.step["rows"], self.step["wanted_rows"] = rows, logit_rows
        self.step["splits"], self.step["compensate"], self.step["items"] = 1, 1, threads

    def run(self, *instructions: op.Instruction) -> None:
        """Run instructions, one after another, with the very scratch that they say they need."""
        program = aligned_zeros((len(instructions), op.WIDTH), np.int64)
        for words, instruction in zip(program, instructions, strict=True):
            op.write(words, instruction)
        link(program, self.threads)
        room = most_scratch(program)
        scratch = aligned_zeros((self.threads, padded(room, 64) + GUARD), np.uint8)
        scratch[:] = 0xA5
        self.step["scratch"], self.step["scratch_stride"] = scratch.ctypes.data, scratch.strides[0]
        Pool(self.control, self.threads).step(program)
        assert (scratch[:, room:] == 0xA5).all(), "an instruction wrote beyond its scratch"

    @property
    def failed(self) -> bool:
        return bool(self.control[FAILED])


def unplaced(tiles: int, blocks: int) -> op.Linear:
    """A product with weights of so many tiles and blocks of channels, and no operands in memory: it is never run."""
    weights = op.Weights(0, 0, 0, 0, bits=4, tiles=tiles, blocks=blocks, groups=1, group_blocks=blocks)
    return op.Linear(weights, op.Quantized(0, 0, 0), False, op.Matrix(0, 0), bias=0, accumulate=False)


def address(array: npt.NDArray[Any] | None) -> int:
    """Where an array begins; 0 for none."""
    return 0 if array is None else int(array.ctypes.data)


def matrix(array: npt.NDArray[Any]) -> op.Matrix:
    """An array's rows as an instruction names them."""
    return op.Matrix(address(array), array.strides[0])


def vector(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Numbers of channels [K] in a buffer of whole blocks, zero behind them."""
    out = aligned_zeros((padded(values.size, 32),), np.float32)
    out[: values.size] = values
    return out


def wide(values: npt.NDArray[Any], rows: int = 0) -> npt.NDArray[np.float32]:
    """A matrix in a buffer with whole blocks of channels and, poisoned, whole blocks of rows."""
    out = aligned_zeros((padded(max(rows, values.shape[0]), 16), padded(values.shape[1], 32)), np.float32)
    out[values.shape[0] :] = np.nan
    out[: values.shape[0], : values.shape[1]] = values
    return out


class Activations:
    """Rows of INT8 activations in the layout of the kernels (`runtime.backends.cpu.kernels.activation`).

    Args:
        rows: M.
        width: K.
        group: Channels that share a scale.
    """

    def __init__(self, rows: int, width: int, group: int) -> None:
        self.rows, self.width, self.group = rows, width, group
        self.side, self.K = row_block(rows), padded(width, 32)
        self.G = -(-self.K // group)
        filled = padded(rows, 16)
        self.codes = aligned_zeros((filled * code_bytes(self.K),), np.int8)
        self.codes[:] = 77  # what nobody writes must not matter
        self.scales, self.shifts = (aligned_zeros((filled * self.G,), np.float32) for _ in range(2))
        self.sums = aligned_zeros((filled * self.G,), np.int32)

    @property
    def places(self) -> op.Quantized:
        """What an instruction says of them."""
        return op.Quantized(*map(address, (self.codes, self.scales, self.shifts, self.sums)))

    def parts(self, row: int) -> tuple[npt.NDArray[Any], ...]:
        """Views of a row: codes, in quads or pieces, scales [G], shifts [G] and sums [G]."""
        block, lane = divmod(row, self.side)
        size, groups = self.side * code_bytes(self.K), self.side * self.G
        pieces = (-1, self.side, PIECE if in_registers(self.side) else 4)
        codes = self.codes[block * size : (block + 1) * size].reshape(pieces)[:, lane]
        own = slice(block * groups, (block + 1) * groups)
        numbers = (self.scales, self.shifts, self.sums)
        return codes, *(array[own].reshape(self.G, self.side)[:, lane] for array in numbers)

    def fill(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]) -> None:
        """Write codes [M, K] and scales [M, G], or [M, 1] where all groups of a row share one."""
        for row in range(self.rows):
            own, own_scales, shifts, sums = self.parts(row)
            whole = own.flatten()
            whole[: self.K] = 0
            whole[: self.width] = codes[row]
            own[:] = whole.reshape(own.shape)
            own_scales[:] = scales[row]
            sums[:] = np.add.reduceat(whole[: self.K].astype(np.int32), range(0, self.K, self.group))
            shifts[:] = -own_scales * sums

    def read(self) -> tuple[npt.NDArray[Any], ...]:
        """Codes [M, K padded to 32], scales [M, G], shifts [M, G] and sums [M, G]."""
        rows = [self.parts(row) for row in range(self.rows)]
        codes, *numbers = (np.array(part) for part in zip(*rows, strict=True))
        return codes.reshape(self.rows, -1)[:, : self.K], *numbers


class PlacedResidual:
    """A matrix's residuals where kernels read them."""

    def __init__(self, linear: PackedLinear) -> None:
        assert linear.residual is not None
        self.bits, codes, (N, self.K) = linear.residual.bits, linear.residual.codes, linear.shape
        width = padded(N, 16) if self.bits == 16 else codes.shape[1]
        self.codes = aligned_zeros((self.K, padded(width, 16)), codes.dtype)
        self.codes[:, : codes.shape[1]] = codes
        self.scales = aligned_zeros((padded(N, 16),), np.float16)
        self.scales[:N] = residual_scales(linear.residual)

    @property
    def place(self) -> op.Residual:
        """What an instruction says of them."""
        return op.Residual(address(self.codes), address(self.scales), self.bits, self.codes.strides[0], self.K)


def kept(channels: npt.NDArray[np.integer], K: int) -> npt.NDArray[np.uint8]:
    """Which of K channels are compensated, as instructions have it."""
    found = aligned_zeros((padded(K, 32),), np.uint8)
    found[channels] = 255
    return found
