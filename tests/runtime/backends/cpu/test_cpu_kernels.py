"""Every compiled CPU kernel against its plain reference.

Tolerances: integer results (codes, selections) are equal; sums of float32 products differ only in the order of
addition, so they are held to 1e-5 of the largest magnitude (float32 has 6e-8, and a sum has up to a thousand terms).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.checkpoint import Checkpoint
from models.packed import PackedLinear
from models.packing import pack
from models.quantizers import squeezellm
from models.quantizers.dequantize import dequantize
from runtime.backends.cpu.arena import Arena
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.instructions import SELECT_APPROX, SELECT_EXACT, SELECT_RANDOM, SELECT_STATIC
from runtime.backends.cpu.data.sizes import PIECE
from runtime.backends.cpu.kernels.activation import code_bytes, in_registers
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.tiles import padded, tile_linear, tile_residual
from runtime.backends.operations import activation
from runtime.backends.operations import channels as budget
from runtime.backends.operations import compensate as compensation
from runtime.backends.operations import panel as panels
from runtime.backends.operations import select as selection
from runtime.backends.operations.gate import silu_gate
from runtime.backends.operations.linear import gemv_int8
from runtime.backends.operations.norm import rms_norm
from tests.close import assert_close
from tests.guarded import aligned_zeros

ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 33)


def wide(values: npt.NDArray[Any], rows: int = 0) -> npt.NDArray[np.float32]:
    """A matrix in a buffer with whole blocks of channels and, poisoned, whole blocks of rows."""
    out = aligned_zeros((padded(max(rows, values.shape[0]), 16), padded(values.shape[1], 32)), np.float32)
    out[values.shape[0] :] = np.nan
    out[: values.shape[0], : values.shape[1]] = values
    return out


class Activations:
    """Buffers for the quantized activations of some rows."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        self.codes = aligned_zeros((padded(rows, 16), padded(width, PIECE)), np.int8)
        self.scales = aligned_zeros((padded(rows, 16), padded(width, 32) // 32), np.float32)
        self.shifts = aligned_zeros((padded(rows, 16), padded(width, 32) // 32), np.float32)

    @property
    def places(self) -> op.Quantized:
        """What an instruction says of them."""
        return op.Quantized(address(self.codes), address(self.scales), address(self.shifts))

    def fill(self, codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], group: int) -> None:
        """Write codes [M, K] and scales [M, G] in the layout of the kernels."""
        side, G = row_block(self.rows), scales.shape[1]
        sums = np.add.reduceat(codes.astype(np.int64), range(0, self.width, group), axis=1)
        for row in range(self.rows):
            block, lane = divmod(row, side)
            pieces = self._pieces(block, side)
            full = np.zeros(pieces[:, lane].size, np.int8)
            full[: self.width] = codes[row]
            pieces[:, lane] = full.reshape(len(pieces), -1)
            for array, values in ((self.scales, scales[row]), (self.shifts, -scales[row] * sums[row])):
                array.reshape(-1)[block * side * G : (block + 1) * side * G].reshape(G, side)[:, lane] = values

    def _pieces(self, block: int, side: int) -> npt.NDArray[np.int8]:
        """The codes of a row block: [pieces, rows, channels of a piece]."""
        size = side * code_bytes(padded(self.width, 32))
        own = self.codes.reshape(-1)[block * size : (block + 1) * size]
        return own.reshape(-1, side, PIECE if in_registers(side) else 4)

    def read(self, group: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Codes [M, K], scales [M, G] and shifts [M, G] from the layout of the kernels."""
        side = row_block(self.rows)
        G = -(-padded(self.width, 32) // group)
        codes, numbers = [], []
        for row in range(self.rows):
            block, lane = divmod(row, side)
            codes.append(self._pieces(block, side)[:, lane].reshape(-1)[: self.width])
            numbers.append(
                [
                    a.reshape(-1)[block * side * G : (block + 1) * side * G].reshape(G, side)[:, lane]
                    for a in (self.scales, self.shifts)
                ]
            )
        return np.array(codes), np.array([n[0] for n in numbers]), np.array([n[1] for n in numbers])


def address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def matrix(array: npt.NDArray[Any]) -> op.Matrix:
    return op.Matrix(address(array), array.strides[0])


@pytest.mark.parametrize("kind", ["packed_linear", "packed_codebook_linear"])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("N", "K", "group"), [(16, 32, 32), (40, 96, 32), (33, 172, 64), (96, 1088, 128), (16, 100, 128)]
)
def test_matrix_product(
    request: pytest.FixtureRequest,
    machine: Callable[..., Any],
    kind: str,
    bits: int,
    rows: int,
    N: int,
    K: int,
    group: int,
) -> None:
    rng = np.random.default_rng(rows * N)
    bias = rng.standard_normal(N).astype(np.float32)
    pack_linear: Callable[..., PackedLinear] = request.getfixturevalue(kind)
    linear = pack_linear(rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, bias=bias)
    x = torch.from_numpy(rng.standard_normal((rows, K)).astype(np.float32))
    codes, scales = activation.quantize(x, group)
    expected = gemv_int8(codes, scales, linear).numpy()
    tiled, inputs = tile_linear(linear, Arena()), Activations(rows, K)
    inputs.fill(codes.numpy(), scales.numpy(), group)
    before = rng.standard_normal((rows, N)).astype(np.float32)
    wide_bias = aligned_zeros((padded(N, 16),), np.float32)
    wide_bias[:N] = bias
    for accumulate in (False, True):
        out = wide(before, rows)
        operands = (tiled.weights, inputs.places, False, matrix(out))
        machine(rows).run(op.Linear(*operands, bias=address(wide_bias), accumulate=accumulate))
        assert_close(out[:rows, :N], expected + (before if accumulate else 0), "sums")
        assert np.isnan(out[rows:]).all()


def product(machine: Callable[..., Any], linear: PackedLinear, codes: Any, scales: Any) -> npt.NDArray[np.float32]:
    """Run a LINEAR instruction on INT8 activations [M, K] with scales [M, G]. Returns float32 [M, N]."""
    rows, N = codes.shape[0], linear.shape[0]
    inputs, out = Activations(rows, linear.shape[1]), wide(np.zeros((rows, N), np.float32))
    inputs.fill(codes, scales, linear.group_size)
    tiled = tile_linear(linear, Arena())
    machine(rows).run(op.Linear(tiled.weights, inputs.places, False, matrix(out), bias=0, accumulate=False))
    return out[:rows, :N]


def with_codebooks(
    codes: npt.NDArray[np.uint8], codebook: npt.NDArray[np.int8], scales: npt.NDArray[np.float16], group: int
) -> PackedLinear:
    """A matrix of codes [N, K]."""
    bits = codebook.shape[1].bit_length() - 1
    return PackedLinear(
        name="layers.0.o",
        shape=(codes.shape[0], codes.shape[1]),
        bits=bits,
        group_size=group,
        codes=pack(codes, bits),
        scales=scales,
        zeros=None,
        codebook=codebook,
        bias=None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("bits", [3, 4])
def test_the_largest_entries_meet_the_largest_activations(machine: Callable[..., Any], bits: int, rows: int) -> None:
    """Nothing saturates, also where products are added up in 16 bits."""
    N, K, group = 32, 256, 128
    rng = np.random.default_rng(bits)
    levels = np.full((N, 2**bits), 127, np.int8)
    levels[::3, ::2] = -127
    codes = rng.integers(0, 2**bits, (N, K)).astype(np.uint8)
    linear = with_codebooks(codes, levels, np.ones((N, 1), np.float16), group)
    x = np.full((rows, K), 127, np.int8)
    x[::2, ::3] = -127
    found = product(machine, linear, x, np.ones((rows, K // group), np.float32))
    expected = x.astype(np.int64) @ np.take_along_axis(levels, codes.astype(np.intp), 1).astype(np.int64).T
    assert np.array_equal(found, expected)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    N=st.integers(1, 70),
    K=st.integers(1, 700),
    bits=st.sampled_from([3, 4]),
    group=st.sampled_from([32, 96, 128]),
    rows=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_any_codebooks(
    machine: Callable[..., Any], N: int, K: int, bits: int, group: int, rows: int, seed: int
) -> None:
    """Random entries, and activations with a mean, which an offset of the entries would add up."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (N, K)).astype(np.uint8)
    levels = rng.integers(-127, 128, (N, 2**bits)).astype(np.int8)
    linear = with_codebooks(codes, levels, rng.uniform(1e-4, 1e-2, (N, 1)).astype(np.float16), group)
    x = torch.from_numpy((rng.standard_normal((rows, K)) + 3).astype(np.float32))
    x_codes, x_scales = activation.quantize(x, group)
    expected = gemv_int8(x_codes, x_scales, linear).numpy()
    largest = 128 * x.abs().sum(1, keepdim=True).numpy() * linear.scales.T.astype(np.float64)
    error = np.abs(product(machine, linear, x_codes.numpy(), x_scales.numpy()) - expected)
    assert (error <= 1e-6 * largest).all()


@pytest.mark.data
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.1.down"])
def test_codebooks_of_real_weights(machine: Callable[..., Any], shared_data: Path, name: str, bits: int) -> None:
    weight = Checkpoint.open(shared_data / "models" / "english3m").linear(name)[0].float().numpy()
    found = squeezellm.quantize(weight, np.ones_like(weight), bits)
    linear = with_codebooks(found.codes, found.codebook, found.scales, 128)
    rng = np.random.default_rng(bits)
    x = torch.from_numpy((rng.standard_normal((17, weight.shape[1])) ** 3).astype(np.float32))
    codes, scales = activation.quantize(x, 128)
    for rows in (1, 17):
        expected = gemv_int8(codes[:rows], scales[:rows], linear).numpy()
        assert_close(product(machine, linear, codes[:rows].numpy(), scales[:rows].numpy()), expected, "sums")
        plain = x[:rows].double().numpy() @ weight.T
        assert np.abs(expected - plain).mean() <= {3: 0.25, 4: 0.12}[bits] * plain.std()


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("K", [64, 172, 1088])
def test_norm_and_quantization(machine: Callable[..., Any], rows: int, K: int) -> None:
    rng = np.random.default_rng(K + rows)
    x = (rng.standard_normal((rows, K)) * np.exp(rng.standard_normal(K))).astype(np.float32)
    weight = aligned_zeros((padded(K, 32),), np.float32)
    weight[:K] = 1 + 0.3 * rng.standard_normal(K)
    source, out, quantized = wide(x), wide(np.zeros((rows, K), np.float32)), Activations(rows, K)
    to = op.Input(K, False, matrix(out), quantized.places, group_blocks=2)
    machine(rows).run(op.Norm(matrix(source), to, address(weight), eps=1e-5))
    expected = rms_norm(torch.from_numpy(x), torch.from_numpy(weight[:K].copy()), 1e-5).numpy()
    assert_close(out[:rows, :K], expected, "sums")
    check_quantized(quantized, out[:rows, :K], 64)


def check_quantized(quantized: Activations, values: npt.NDArray[np.float32], group: int) -> None:
    """Codes and scales are what the reference makes of the very values that were written."""
    codes, scales = activation.quantize(torch.from_numpy(values.copy()), group)
    actual_codes, actual_scales, shifts = quantized.read(group)
    # One division apart, so a code may fall on the other side of a tie.
    assert np.abs(actual_codes.astype(int) - codes.numpy()).max() <= 1
    assert (actual_codes != codes.numpy()).mean() < 1e-3
    assert_close(actual_scales, scales.numpy(), "sums")
    sums = np.add.reduceat(actual_codes.astype(np.int64), range(0, values.shape[1], group), axis=1)
    assert_close(shifts, -actual_scales * sums, "sums")


@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_quantization(machine: Callable[..., Any], rows: int) -> None:
    rng, width = np.random.default_rng(rows), 172
    x = (rng.standard_normal((rows, 2 * width)) * 4).astype(np.float32)
    x[0, :4] = (90, -90, 0, -1e-3)
    source, out, quantized = wide(x), wide(np.full((rows, 192), 7, np.float32)), Activations(rows, width)
    machine(rows).run(op.Gate(matrix(source), op.Input(width, False, matrix(out), quantized.places, group_blocks=1)))
    gates, ups = torch.from_numpy(x[:, :width].copy()), torch.from_numpy(x[:, width:].copy())
    assert_close(out[:rows, :width], silu_gate(gates, ups).numpy(), "sums")
    assert not out[:rows, width:192].any()
    check_quantized(quantized, out[:rows, :width], 32)


def run_select(
    machine: Callable[..., Any], x: npt.NDArray[np.float32], k_chunk: int, mode: int, **operands: Any
) -> tuple[npt.NDArray[np.int32], Any]:
    """Run a selection over all rows. Returns the channels [M, k] and the machine."""
    rows, K = x.shape
    total = budget.total_budget(K, k_chunk)
    chosen, source = aligned_zeros((rows, total), np.int32), wide(x)
    runner = machine(rows)
    runner.inputs[2, :rows] = np.arange(100, 100 + rows)
    instruction = op.Select(
        x=matrix(source),
        width=K,
        wanted=False,
        k_chunk=k_chunk,
        total=total,
        chosen=matrix(chosen),
        mode=mode,
        border=op.Border(0.0, 0.0, 0.0),
        static=0,
        seed=0,
        layer=0,
        measure=False,
        hits=0,
    )
    runner.run(instruction._replace(**operands))
    return chosen, runner


@pytest.mark.parametrize("K", [64, 1000, 1024, 2500])
@pytest.mark.parametrize("k_chunk", [1, 16, 300, 1024])
def test_selectors(machine: Callable[..., Any], K: int, k_chunk: int) -> None:
    rng = np.random.default_rng(K + k_chunk)
    x = (rng.standard_normal((3, K)) ** 3).astype(np.float32)
    x[1, ::3] = 0.5  # ties
    x[2] = 0
    ranks = np.sort(np.abs(rng.standard_normal(K) ** 3).astype(np.float32))[::-1].copy()
    found = budget.buckets(ranks, budget.total_budget(K, k_chunk))
    tensor = torch.from_numpy(x)
    chosen, _ = run_select(machine, x, k_chunk, SELECT_EXACT)
    assert np.array_equal(chosen, np.sort(selection.exact(tensor, k_chunk).numpy(), axis=1))
    border = op.Border(found.b15, found.upper_scale, found.lower_scale)
    chosen, _ = run_select(machine, x, k_chunk, SELECT_APPROX, border=border)
    assert np.array_equal(chosen, np.sort(selection.approximate(tensor, k_chunk, found).numpy(), axis=1))
    static = budget.static_channels(rng.random(K).astype(np.float32), k_chunk)
    chosen, _ = run_select(machine, x, k_chunk, SELECT_STATIC, static=address(static))
    assert np.array_equal(chosen, np.broadcast_to(static, chosen.shape))
    chosen, _ = run_select(machine, x, k_chunk, SELECT_RANDOM, seed=5, layer=3)
    for row, position in enumerate((100, 101, 102)):
        assert np.array_equal(chosen[row], budget.random_channels(K, k_chunk, seed=5, layer=3, position=position))


@pytest.mark.parametrize("mode", [SELECT_EXACT, SELECT_APPROX])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_noticed(machine: Callable[..., Any], mode: int, bad: float) -> None:
    x = np.ones((2, 1100), np.float32)
    border = op.Border(b15=0.5, upper=15.0, lower=32.0)
    assert not run_select(machine, x, 8, mode, border=border)[1].failed
    x[1, 1050] = bad
    assert run_select(machine, x, 8, mode, border=border)[1].failed


def test_recall_is_measured_against_the_whole_row(machine: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3000)).astype(np.float32)
    sums = aligned_zeros((16,), np.float32)
    chosen, _ = run_select(machine, x, 40, SELECT_EXACT, measure=True, hits=address(sums))
    expected = [budget.recall(row, channels) for row, channels in zip(x, chosen, strict=True)]
    assert 0.5 < np.mean(expected) < 1
    assert_close(sums[:4], np.array(expected), "sums")


@pytest.mark.parametrize("residual_bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("N", "K", "k"), [(16, 64, 1), (40, 172, 7), (200, 96, 96), (600, 64, 13)])
def test_compensation(
    machine: Callable[..., Any],
    packed_linear: Callable[..., PackedLinear],
    residual_bits: int,
    N: int,
    K: int,
    k: int,
) -> None:
    rng, rows = np.random.default_rng(N + k), 3
    linear = packed_linear(rng.standard_normal((N, K)).astype(np.float32), bits=3, residual_bits=residual_bits)
    assert linear.residual is not None
    x = rng.standard_normal((rows, K)).astype(np.float32)
    chosen = np.sort(np.array([rng.permutation(K)[:k] for _ in range(rows)]), axis=1).astype(np.int32)
    residual = compensation.dequantize_residual(linear.residual, N)
    zero = torch.zeros(rows, N)
    expected = compensation.compensate(zero, torch.from_numpy(x), torch.from_numpy(chosen).long(), residual).numpy()
    tiles = padded(N, 16) // 16
    scales = aligned_zeros((16 * tiles,), np.float16)
    codes = linear.residual.codes
    if linear.residual.scales is None:
        codes = aligned_zeros((K, 16 * tiles), np.float16)
        codes[:, :N] = linear.residual.codes
    else:
        scales[:N] = linear.residual.scales
    inputs, tiled = (
        Activations(rows, K),
        tile_linear(linear, Arena()),
    )  # zero activations: only the compensation remains
    source, out = wide(x), wide(np.zeros((rows, N), np.float32))
    linear_instruction = op.Linear(
        weights=tiled.weights,
        x=inputs.places,
        wanted=False,
        out=matrix(out),
        bias=0,
        accumulate=False,
        total=k,
        residual=op.Residual(address(codes), address(scales), residual_bits, codes.strides[0]),
        values=matrix(source),
        chosen=matrix(chosen),
    )
    machine(rows).run(linear_instruction)
    assert_close(out[:rows, :N], expected, "sums")


@pytest.mark.parametrize("kind", ["packed_linear", "packed_codebook_linear"])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("residual_bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("rows", "N", "K", "group"), [(2, 40, 96, 32), (17, 33, 172, 64), (33, 288, 1088, 128)])
def test_product_with_residuals_in_the_weights(
    request: pytest.FixtureRequest,
    machine: Callable[..., Any],
    kind: str,
    bits: int,
    residual_bits: int,
    rows: int,
    N: int,
    K: int,
    group: int,
) -> None:
    rng = np.random.default_rng(rows + bits)
    bias = aligned_zeros((padded(N, 16),), np.float32)
    bias[:N] = rng.standard_normal(N)
    linear = request.getfixturevalue(kind)(
        rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, residual_bits=residual_bits
    )
    channels = np.sort(rng.permutation(K)[: K * 2 // 3])
    codes, scales = activation.quantize(torch.from_numpy(rng.standard_normal((rows, K)).astype(np.float32)), group)
    expected = panels.product(codes.numpy(), scales.numpy(), panels.panel(linear, channels), bias[:N])
    inputs, tiled = Activations(rows, K), tile_linear(linear, Arena())
    inputs.fill(codes.numpy(), scales.numpy(), group)
    residual_scales = aligned_zeros((16 * tiled.tiles,), np.float16)
    residual_scales[:N] = panels.residual_scales(linear.residual)
    stored = linear.residual.codes
    if residual_bits == 16:
        stored = aligned_zeros((K, 16 * tiled.tiles), np.float16)
        stored[:, :N] = linear.residual.codes
    kept = aligned_zeros((padded(K, 32),), np.uint8)
    kept[channels] = 255
    before = rng.standard_normal((rows, N)).astype(np.float32)
    for accumulate in (False, True):
        out = wide(before, rows)
        place = op.Residual(address(stored), address(residual_scales), residual_bits, stored.strides[0], K)
        operands = (tiled.weights, inputs.places, matrix(out), address(bias), accumulate, place, address(kept))
        machine(rows).run(op.Panel(*operands))
        assert_close(out[:rows, :N], expected + (before if accumulate else 0), "sums")
        assert np.isnan(out[rows:]).all()


def product_beside(
    machine: Callable[..., Any],
    linear: PackedLinear,
    rounded: tuple[torch.Tensor, torch.Tensor],
    channels: npt.NDArray[np.integer],
    before: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """The product of few rows, codes and scales, that share the residuals of some channels; added to `before`."""
    assert linear.residual is not None
    codes, scales = (part.numpy() for part in rounded)
    (rows, K), N = codes.shape, linear.shape[0]
    inputs, tiled = Activations(rows, K), tile_linear(linear, Arena())
    inputs.fill(codes, scales, linear.group_size)
    stored, bits = linear.residual.codes, linear.residual.bits
    wide_codes = aligned_zeros((K, padded(max(stored.shape[1], N if bits == 16 else 0), 16)), stored.dtype)
    wide_codes[:, : stored.shape[1]] = stored
    residual_scales = aligned_zeros((16 * tiled.tiles,), np.float16)
    residual_scales[:N] = panels.residual_scales(linear.residual)
    kept = aligned_zeros((padded(K, 32),), np.uint8)
    kept[channels] = 255
    out = wide(np.zeros((rows, N), np.float32) if before is None else before, rows)
    own = op.Linear(tiled.weights, inputs.places, False, matrix(out), 0, before is not None)
    place = op.Residual(address(wide_codes), address(residual_scales), bits, wide_codes.strides[0], K)
    machine(rows).run(own._replace(residual=place, kept=address(kept)))
    assert np.isnan(out[rows:]).all()
    found: npt.NDArray[np.float32] = out[:rows, :N]
    return found


@pytest.mark.parametrize("kind", ["packed_linear", "packed_codebook_linear"])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("N", "K", "group"), [(16, 32, 32), (100, 200, 64), (72, 1100, 128)])
def test_all_residuals_as_tiles(
    machine: Callable[..., Any],
    request: pytest.FixtureRequest,
    kind: str,
    bits: int,
    N: int,
    K: int,
    group: int,
) -> None:
    """The same sums as by reading all rows; with uniform codes the same bits among other rows as alone."""
    rng = np.random.default_rng(N)
    linear = request.getfixturevalue(kind)(
        rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, residual_bits=4
    )
    rounded = activation.quantize(torch.from_numpy(rng.standard_normal((7, K)).astype(np.float32)), group)
    before = rng.standard_normal((7, N)).astype(np.float32)
    tiled = tile_linear(linear, Arena())
    residual = tile_residual(linear.residual, tiled, Arena())
    whole = residual.weights

    def product(first: int, last: int) -> npt.NDArray[np.float32]:
        codes, scales = (part.numpy()[first:last] for part in rounded)
        inputs = Activations(last - first, K)
        inputs.fill(codes, scales, group)
        out = wide(before[first:last], last - first)
        own = op.Linear(tiled.weights, inputs.places, False, matrix(out), 0, True)
        machine(last - first).run(own._replace(whole=op.Whole(whole.codes, whole.scales, whole.zeros)))
        assert np.isnan(out[last - first :]).all()
        found: npt.NDArray[np.float32] = out[: last - first, :N].copy()
        return found

    together = product(0, 7)
    assert_close(together, product_beside(machine, linear, rounded, np.arange(K), before), "sums")
    assert np.array_equal(together[2:5], product(2, 5))
    for row in range(7):
        alone = product(row, row + 1)[0]
        assert_close(alone, together[row], "sums")
        assert np.array_equal(alone, together[row]) or linear.codebook is not None


@pytest.mark.parametrize("kind", ["packed_linear", "packed_codebook_linear"])
@pytest.mark.parametrize("residual_bits", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("bits", "rows", "N", "K", "group"), [(3, 2, 40, 96, 32), (4, 7, 33, 173, 64), (3, 16, 300, 1088, 128)]
)
def test_product_with_few_rows_and_the_residuals_beside_it(
    request: pytest.FixtureRequest,
    machine: Callable[..., Any],
    kind: str,
    bits: int,
    residual_bits: int,
    rows: int,
    N: int,
    K: int,
    group: int,
) -> None:
    rng = np.random.default_rng(rows + bits)
    linear = request.getfixturevalue(kind)(
        rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, residual_bits=residual_bits
    )
    channels = np.sort(rng.permutation(K)[: K * 2 // 3])
    rounded = activation.quantize(torch.from_numpy(rng.standard_normal((rows, K)).astype(np.float32)), group)
    x = activation.dequantize(*rounded, group).double().numpy()
    expected = x @ (dequantize(linear).astype(np.float64) + panels.restored(linear, channels)).T
    before = rng.standard_normal((rows, N)).astype(np.float32)
    assert_close(product_beside(machine, linear, rounded, channels), expected, "sums")
    assert_close(product_beside(machine, linear, rounded, channels, before), expected + before, "sums")


@pytest.mark.data
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.11.down"])
def test_few_rows_of_real_weights(
    machine: Callable[..., Any], packed_linear: Callable[..., PackedLinear], smollm2_hf: Path, name: str
) -> None:
    """All residuals of a real matrix bring rows with one huge activation near the product in full precision."""
    weight = Checkpoint.open(smollm2_hf).linear(name)[0].float().numpy()
    linear = packed_linear(weight, bits=3, group_size=64, residual_bits=4)
    K = weight.shape[1]
    values = np.random.default_rng(3).standard_normal((5, K)).astype(np.float32)
    values[:, 7] *= 300
    rounded = activation.quantize(torch.from_numpy(values), 64)
    x = activation.dequantize(*rounded, 64).double().numpy()
    found = product_beside(machine, linear, rounded, np.arange(K))
    base = dequantize(linear).astype(np.float64)
    assert_close(found, x @ (base + panels.restored(linear, np.arange(K))).T, "sums")
    exact = x @ weight.T.astype(np.float64)
    assert np.abs(found - exact).mean() < 0.2 * np.abs(x @ base.T - exact).mean()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 95), (2, 17)])
def test_a_number_that_is_not_finite_fails_the_step(
    machine: Callable[..., Any], value: float, place: tuple[int, int]
) -> None:
    x = aligned_zeros((4, 96), np.float32)
    x[:] = 3e38
    x[3] = np.nan  # no row whose logits are wanted
    driver = machine(5, logit_rows=3)
    driver.run(op.Check(matrix(x), 96))
    assert not driver.failed
    x[place] = value
    driver.run(op.Check(matrix(x), 96))
    assert driver.failed
