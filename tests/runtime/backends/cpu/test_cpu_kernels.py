"""What is special to the compiled CPU kernels, against the plain references; `contract` has what every backend does.

Tolerances: integer results (codes, selections) are equal; sums of float32 products differ only in the order of
addition, so they are held to 1e-5 of the largest magnitude (float32 has 6e-8, and a sum has up to a thousand terms).
"""

from __future__ import annotations

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
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.instructions import SELECT_EXACT
from runtime.backends.cpu.data.records import padded
from runtime.backends.cpu.tiles import Arena, tile_linear, tile_residual
from runtime.backends.operations import channels as budget
from runtime.backends.operations import panel as panels
from runtime.backends.operations.linear import dequantize_groups, gemv_int8, quantize_groups
from tests.close import assert_close
from tests.guarded import aligned_zeros
from tests.runtime.backends.cpu.machine import Activations, Machine, PlacedResidual, address, kept, matrix, wide
from tests.runtime.conftest import pack_codebook_linear, pack_linear


def product(
    linear: PackedLinear, codes: Any, scales: Any, before: npt.NDArray[np.float32] | None = None, **operands: Any
) -> npt.NDArray[np.float32]:
    """Run a LINEAR instruction on INT8 activations [M, K] with scales [M, G].

    Args:
        before: What the product is added to, float32 [M, N]; None: nothing.
        operands: Further ones of the instruction.

    Returns:
        The product, float32 [M, N].
    """
    rows, N = codes.shape[0], linear.shape[0]
    inputs, tiled = Activations(rows, linear.shape[1], linear.group_size), tile_linear(linear, Arena())
    inputs.fill(codes, scales)
    out = wide(np.zeros((rows, N), np.float32) if before is None else before)
    x, accumulate = inputs.places, before is not None
    own = op.Linear(tiled.weights, x, False, matrix(out), bias=0, accumulate=accumulate, plain=x)
    Machine(rows).run(own._replace(**operands))
    assert np.isnan(out[rows:]).all()
    found: npt.NDArray[np.float32] = out[:rows, :N]
    return found


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
def test_the_largest_entries_meet_the_largest_activations(bits: int, rows: int) -> None:
    """Nothing saturates, also where products are added up in 16 bits."""
    N, K, group = 32, 256, 128
    rng = np.random.default_rng(bits)
    levels = np.full((N, 2**bits), 127, np.int8)
    levels[::3, ::2] = -127
    codes = rng.integers(0, 2**bits, (N, K)).astype(np.uint8)
    linear = with_codebooks(codes, levels, np.ones((N, 1), np.float16), group)
    x = np.full((rows, K), 127, np.int8)
    x[::2, ::3] = -127
    found = product(linear, x, np.ones((rows, K // group), np.float32))
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
def test_any_codebooks(N: int, K: int, bits: int, group: int, rows: int, seed: int) -> None:
    """Random entries, and activations with a mean, which an offset of the entries would add up."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (N, K)).astype(np.uint8)
    levels = rng.integers(-127, 128, (N, 2**bits)).astype(np.int8)
    linear = with_codebooks(codes, levels, rng.uniform(1e-4, 1e-2, (N, 1)).astype(np.float16), group)
    x = torch.from_numpy((rng.standard_normal((rows, K)) + 3).astype(np.float32))
    x_codes, x_scales = quantize_groups(x, group)
    expected = gemv_int8(x_codes, x_scales, linear).numpy()
    largest = 128 * x.abs().sum(1, keepdim=True).numpy() * linear.scales.T.astype(np.float64)
    error = np.abs(product(linear, x_codes.numpy(), x_scales.numpy()) - expected)
    assert (error <= 1e-6 * largest).all()


@pytest.mark.data
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.1.down"])
def test_codebooks_of_real_weights(shared_data: Path, name: str, bits: int) -> None:
    weight = Checkpoint.open(shared_data / "models" / "english3m").linear(name)[0].float().numpy()
    found = squeezellm.quantize(weight, np.ones_like(weight), bits)
    linear = with_codebooks(found.codes, found.codebook, found.scales, 128)
    rng = np.random.default_rng(bits)
    x = torch.from_numpy((rng.standard_normal((17, weight.shape[1])) ** 3).astype(np.float32))
    codes, scales = quantize_groups(x, 128)
    for rows in (1, 17):
        expected = gemv_int8(codes[:rows], scales[:rows], linear).numpy()
        assert_close(product(linear, codes[:rows].numpy(), scales[:rows].numpy()), expected, "sums")
        plain = x[:rows].double().numpy() @ weight.T
        assert np.abs(expected - plain).mean() <= {3: 0.25, 4: 0.12}[bits] * plain.std()


def run_select(
    x: npt.NDArray[np.float32], k_chunk: int, mode: int, **operands: Any
) -> tuple[npt.NDArray[np.int32], Any]:
    """Run a selection over all rows. Returns the channels [M, k] and the machine."""
    rows, K = x.shape
    total = budget.total_budget(K, k_chunk)
    chosen, source = aligned_zeros((rows, total), np.int32), wide(x)
    runner = Machine(rows)
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


def test_recall_is_measured_against_the_whole_row() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3000)).astype(np.float32)
    sums = aligned_zeros((16,), np.float32)
    chosen, _ = run_select(x, 40, SELECT_EXACT, measure=True, hits=address(sums))
    expected = [budget.recall(row, channels) for row, channels in zip(x, chosen, strict=True)]
    assert 0.5 < np.mean(expected) < 1
    assert_close(sums[:4], np.array(expected), "sums")


@pytest.mark.parametrize("pack", [pack_linear, pack_codebook_linear])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("residual_bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("rows", "N", "K", "group"), [(2, 40, 96, 32), (17, 33, 172, 64), (33, 288, 1088, 128)])
def test_product_with_residuals_in_the_weights(
    pack: Any, bits: int, residual_bits: int, rows: int, N: int, K: int, group: int
) -> None:
    rng = np.random.default_rng(rows + bits)
    bias = aligned_zeros((padded(N, 16),), np.float32)
    bias[:N] = rng.standard_normal(N)
    linear = pack(
        rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, residual_bits=residual_bits
    )
    channels = np.sort(rng.permutation(K)[: K * 2 // 3])
    codes, scales = quantize_groups(torch.from_numpy(rng.standard_normal((rows, K)).astype(np.float32)), group)
    expected = panels.product(codes.numpy(), scales.numpy(), panels.panel(linear, channels), bias[:N])
    inputs, tiled = Activations(rows, K, linear.group_size), tile_linear(linear, Arena())
    inputs.fill(codes.numpy(), scales.numpy())
    residual, chosen = PlacedResidual(linear), kept(channels, K)
    before = rng.standard_normal((rows, N)).astype(np.float32)
    for accumulate in (False, True):
        out = wide(before, rows)
        operands = (tiled.weights, inputs.places, matrix(out), address(bias), accumulate, residual.place)
        Machine(rows).run(op.Panel(*operands, address(chosen)))
        assert_close(out[:rows, :N], expected + (before if accumulate else 0), "sums")
        assert np.isnan(out[rows:]).all()


def product_beside(
    linear: PackedLinear,
    rounded: tuple[torch.Tensor, torch.Tensor],
    channels: npt.NDArray[np.integer],
    before: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """The product of few rows, codes and scales, that share the residuals of some channels; added to `before`."""
    residual, chosen = PlacedResidual(linear), kept(channels, linear.shape[1])
    codes, scales = (part.numpy() for part in rounded)
    return product(linear, codes, scales, before, residual=residual.place, kept=address(chosen))


@pytest.mark.parametrize("pack", [pack_linear, pack_codebook_linear])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("N", "K", "group"), [(16, 32, 32), (100, 200, 64), (72, 1100, 128)])
def test_all_residuals_as_tiles(pack: Any, bits: int, N: int, K: int, group: int) -> None:
    """The same sums as by reading all rows; with uniform codes the same bits among other rows as alone."""
    rng = np.random.default_rng(N)
    linear = pack(rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, residual_bits=4)
    rounded = quantize_groups(torch.from_numpy(rng.standard_normal((7, K)).astype(np.float32)), group)
    before = rng.standard_normal((7, N)).astype(np.float32)
    residual = tile_residual(linear.residual, tile_linear(linear, Arena()), Arena())

    def rows(first: int, last: int) -> npt.NDArray[np.float32]:
        codes, scales = (part.numpy()[first:last] for part in rounded)
        return product(linear, codes, scales, before[first:last], whole=residual.whole)

    together = rows(0, 7)
    assert_close(together, product_beside(linear, rounded, np.arange(K), before), "sums")
    assert np.array_equal(together[2:5], rows(2, 5))
    for row in range(7):
        alone = rows(row, row + 1)[0]
        assert_close(alone, together[row], "sums")
        assert np.array_equal(alone, together[row]) or linear.codebook is not None


@pytest.mark.parametrize("pack", [pack_linear, pack_codebook_linear])
@pytest.mark.parametrize("residual_bits", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("bits", "rows", "N", "K", "group"), [(3, 2, 40, 96, 32), (4, 7, 33, 173, 64), (3, 16, 300, 1088, 128)]
)
def test_product_with_few_rows_and_the_residuals_beside_it(
    pack: Any, bits: int, residual_bits: int, rows: int, N: int, K: int, group: int
) -> None:
    rng = np.random.default_rng(rows + bits)
    linear = pack(
        rng.standard_normal((N, K)).astype(np.float32), bits=bits, group_size=group, residual_bits=residual_bits
    )
    channels = np.sort(rng.permutation(K)[: K * 2 // 3])
    rounded = quantize_groups(torch.from_numpy(rng.standard_normal((rows, K)).astype(np.float32)), group)
    x = dequantize_groups(*rounded, group).double().numpy()
    expected = x @ (dequantize(linear).astype(np.float64) + panels.restored(linear, channels)).T
    before = rng.standard_normal((rows, N)).astype(np.float32)
    assert_close(product_beside(linear, rounded, channels), expected, "sums")
    assert_close(product_beside(linear, rounded, channels, before), expected + before, "sums")


@pytest.mark.data
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.11.down"])
def test_few_rows_of_real_weights(smollm2_hf: Path, name: str) -> None:
    """All residuals of a real matrix bring rows with one huge activation near the product in full precision."""
    weight = Checkpoint.open(smollm2_hf).linear(name)[0].float().numpy()
    linear = pack_linear(weight, bits=3, group_size=64, residual_bits=4)
    K = weight.shape[1]
    values = np.random.default_rng(3).standard_normal((5, K)).astype(np.float32)
    values[:, 7] *= 300
    rounded = quantize_groups(torch.from_numpy(values), 64)
    x = dequantize_groups(*rounded, 64).double().numpy()
    found = product_beside(linear, rounded, np.arange(K))
    base = dequantize(linear).astype(np.float64)
    assert_close(found, x @ (base + panels.restored(linear, np.arange(K))).T, "sums")
    exact = x @ weight.T.astype(np.float64)
    assert np.abs(found - exact).mean() < 0.2 * np.abs(x @ base.T - exact).mean()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 95), (2, 17)])
def test_a_number_that_is_not_finite_fails_the_step(value: float, place: tuple[int, int]) -> None:
    x = aligned_zeros((4, 96), np.float32)
    x[:] = 3e38
    x[3] = np.nan  # no row whose logits are wanted
    driver = Machine(5, logit_rows=3)
    driver.run(op.Check(matrix(x), 96))
    assert not driver.failed
    x[place] = value
    driver.run(op.Check(matrix(x), 96))
    assert driver.failed
