"""W4A8 products in integer arithmetic: bit for bit equal to the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from models import per_token
from models.packed import PackedLinear
from models.packing import pack
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.cpu.arena import Arena
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.sizes import PIECE
from runtime.backends.cpu.kernels.activation import code_bytes, in_registers
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.tiles import padded, tile_linear
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.linear import gemm_w4a8, integer_weights
from runtime.load.open import open_decoder
from tests.close import assert_close
from tests.guarded import aligned_zeros
from tests.models.conftest import TEXT, write_checkpoint

ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 33, 49, 81)


def linear_of(N: int, K: int, group: int, *, two_levels: bool, seed: int = 0) -> PackedLinear:
    """A random matrix whose codes, zeros and group scales take all values that they can."""
    rng = np.random.default_rng(seed)
    size = group if two_levels else padded(K, 32)
    G = -(-K // size)
    codes, zeros = rng.integers(0, 16, (N, K), np.uint8), rng.integers(0, 16, (N, G), np.uint8)
    scales = rng.integers(1, 17, (N, G), np.uint8)
    reach = np.maximum(zeros, 15 - zeros)
    scales = np.minimum(scales, 127 // reach).astype(np.uint8)  # as the quantizer leaves them: within INT8
    return PackedLinear(
        name="layers.0.o",
        shape=(N, K),
        bits=4,
        group_size=size,
        codes=pack(codes, 4),
        scales=rng.uniform(1e-3, 1e-2, (N, 1)).astype(np.float16),
        zeros=zeros,
        group_scales=scales if two_levels else None,
        per_token=True,
        bias=rng.standard_normal(N).astype(np.float32),
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


class Tokens:
    """Buffers of INT8 tokens in the layout of the kernels."""

    def __init__(self, rows: int, width: int, group: int) -> None:
        self.rows, self.width, self.group = rows, width, group
        self.side, self.K = row_block(rows), padded(width, 32)
        self.G = -(-self.K // group)
        wide = padded(rows, 16)
        self.codes = aligned_zeros((wide * code_bytes(self.K),), np.int8)
        self.codes[:] = 77  # what nobody writes must not matter
        self.scales, self.shifts = (aligned_zeros((wide * self.G,), np.float32) for _ in range(2))
        self.sums = aligned_zeros((wide * self.G,), np.int32)

    @property
    def places(self) -> op.Quantized:
        """What an instruction says of them."""
        arrays = (self.codes, self.scales, self.shifts, self.sums)
        return op.Quantized(*(int(array.ctypes.data) for array in arrays))

    def parts(self, row: int) -> tuple[npt.NDArray[Any], ...]:
        """Views of a row's codes [K / 4, 4], or in pieces, scales [G] and sums [G]."""
        block, lane = divmod(row, self.side)
        width, groups = code_bytes(self.K), self.side * self.G
        codes = self.codes[block * self.side * width : (block + 1) * self.side * width]
        pieces = (-1, self.side, PIECE) if in_registers(self.side) else (-1, self.side, 4)
        codes = codes.reshape(pieces)[:, lane]
        own = slice(block * groups, (block + 1) * groups)
        return codes, *(array[own].reshape(self.G, self.side)[:, lane] for array in (self.scales, self.sums))

    def fill(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]) -> None:
        """Write codes [M, K] and scales [M, 1]."""
        for row in range(self.rows):
            own, own_scales, sums = self.parts(row)
            wide = own.flatten()
            wide[: self.K] = 0
            wide[: self.width] = codes[row]
            own[:] = wide.reshape(own.shape)
            own_scales[:] = scales[row]
            sums[:] = np.add.reduceat(wide[: self.K].astype(np.int32), range(0, self.K, self.group))


def matrix(array: npt.NDArray[Any]) -> op.Matrix:
    return op.Matrix(int(array.ctypes.data), array.strides[0])


@pytest.mark.parametrize("two_levels", [True, False], ids=["groups", "channel"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("N", "K", "group"), [(16, 32, 32), (40, 96, 32), (33, 172, 64), (96, 1088, 128), (16, 100, 128), (48, 2048, 128)]
)
def test_products_have_the_bits_of_the_integers(
    machine: Callable[..., Any], two_levels: bool, rows: int, N: int, K: int, group: int
) -> None:
    linear = linear_of(N, K, group, two_levels=two_levels, seed=rows * N)
    rng = np.random.default_rng(rows + K)
    x = torch.from_numpy((rng.standard_normal((rows, K)) * 3 + 1).astype(np.float32))
    x[0] = 127.0  # the largest sums there are
    codes, scales = per_token.quantize(x)
    expected = gemm_w4a8(codes, scales, integer_weights(linear), linear).numpy()
    inputs = Tokens(rows, K, linear.group_size)
    inputs.fill(codes.numpy(), scales.numpy())
    tiled = tile_linear(linear, Arena())
    bias = aligned_zeros((padded(N, 16),), np.float32)
    bias[:N] = linear.bias
    out = aligned_zeros((padded(rows, 16), padded(N, 32)), np.float32)
    machine(rows).run(
        op.Linear(tiled.weights, inputs.places, False, matrix(out), bias=int(bias.ctypes.data), accumulate=False)
    )
    np.testing.assert_array_equal(out[:rows, :N], expected)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("K", [64, 172, 1088])
def test_norm_rounds_tokens_by_one_scale(machine: Callable[..., Any], rows: int, K: int) -> None:
    rng = np.random.default_rng(K + rows)
    source = aligned_zeros((padded(rows, 16), padded(K, 32)), np.float32)
    source[:rows, :K] = rng.standard_normal((rows, K)) * np.exp(rng.standard_normal(K))
    weight = aligned_zeros((padded(K, 32),), np.float32)
    weight[:K] = 1
    out, inputs = np.zeros_like(source), Tokens(rows, K, 128)
    to = op.Input(K, False, matrix(out), inputs.places, group_blocks=4, per_token=True)
    machine(rows).run(op.Norm(matrix(source), to, int(weight.ctypes.data), eps=1e-5))
    check(inputs, out[:rows, :K])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gate_rounds_tokens_by_one_scale(machine: Callable[..., Any], rows: int) -> None:
    rng, width = np.random.default_rng(rows), 172
    source = aligned_zeros((16, 2 * padded(width, 32)), np.float32)
    source[:rows, : 2 * width] = rng.standard_normal((rows, 2 * width)) * 4
    out, inputs = aligned_zeros((16, padded(width, 32)), np.float32), Tokens(rows, width, 64)
    out[:] = 7
    machine(rows).run(op.Gate(matrix(source), op.Input(width, False, matrix(out), inputs.places, 2, True)))
    assert not out[:rows, width:].any()
    check(inputs, out[:rows, :width])


def check(inputs: Tokens, values: npt.NDArray[np.float32]) -> None:
    """Codes, scales and sums are what the reference makes of the very values that were written."""
    codes, scales = per_token.quantize(torch.from_numpy(values.copy()))
    for row in range(inputs.rows):
        own, own_scales, sums = inputs.parts(row)
        found = own.reshape(-1)[: inputs.K]
        np.testing.assert_array_equal(found[: inputs.width], codes[row].numpy())
        assert not found[inputs.width :].any()
        np.testing.assert_array_equal(own_scales, scales[row].expand(inputs.G).numpy())
        np.testing.assert_array_equal(sums, np.add.reduceat(found.astype(np.int32), range(0, inputs.K, inputs.group)))


@pytest.mark.parametrize("group_size", [32, 0])
@pytest.mark.parametrize(("residual_bits", "k_chunk"), [(0, 0), (4, 64), (4, 1024)])
def test_the_decoder_answers_as_the_reference_does(
    tmp_path: Path, group_size: int, residual_bits: int, k_chunk: int
) -> None:
    """Prompt and decoded tokens, with biases, with and without compensation of both."""
    folder = write_checkpoint(tmp_path / "checkpoint", family="qwen2", intermediate=160)
    recipe = Recipe.usual("qoq", group_size=group_size, residual_bits=residual_bits)
    info = quantize(folder, Store(tmp_path / "store"), recipe, calibration=TEXT)
    model = StoredModel.open_folder(info.path)
    answers = []
    for backend in ("cpu", "reference"):
        options = DecoderOptions(context=64, max_rows=32, k_chunk=k_chunk, prompt_k_chunk=min(1024, k_chunk * 16))
        decoder, _ = open_decoder(model, options, backend)
        found = []
        with decoder.session():
            for tokens, start in (([1, 5, 9, 30, 12, 40, 7, 8, 20, 33, 11, 50, 3, 4, 6, 10, 19, 21], 0), ([17], 18)):
                rows = np.arange(len(tokens), dtype=np.int32)
                step = Step(
                    tokens=np.array(tokens, np.int32),
                    slots=np.zeros(len(tokens), np.int32),
                    positions=rows + start,
                    logit_rows=rows,
                )
                found.append(decoder.forward(step).copy())
        answers.append(np.concatenate(found))
        decoder.close()
    # Norms and attention round otherwise, and a code next to a tie may fall on its other side.
    # All residuals meet activations in INT8 here, and in float32 there.
    allowed = (0.03 if k_chunk == 1024 else 0.02) * np.sqrt(np.mean(answers[1] ** 2))
    assert_close(np.sqrt(np.mean((answers[0] - answers[1]) ** 2)) < allowed, True, "exact")
