"""The CPU backend's kernels, run as instructions; what they leave beside their result is checked here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.packed import PackedLinear
from runtime.backends.cpu.cache import CpuCache
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import padded
from runtime.backends.cpu.tiles import Arena, tile_linear
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations import channels as budget
from runtime.backends.operations.linear import dequantize_groups, quantize_groups
from tests.close import Tolerance, assert_close
from tests.guarded import aligned_zeros
from tests.runtime.backends.contract.kernels import HeadOptions, Selector
from tests.runtime.backends.cpu.machine import Activations, Machine, PlacedResidual, address, matrix, vector, wide
from tests.runtime.conftest import make_spec

MODES = {
    "approx": op.SELECT_APPROX,
    "exact": op.SELECT_EXACT,
    "static": op.SELECT_STATIC,
    "random": op.SELECT_RANDOM,
}
_POISON = 7


class CpuKernels:
    """See `tests.runtime.backends.contract.kernels.Kernels`."""

    written = "sums"
    all_kept = True

    def norm(self, h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        source, weights = wide(h.numpy()), vector(weight.numpy())
        return _rounded(h.shape, 64, lambda to: op.Norm(matrix(source), to, address(weights), eps=eps))

    def gate(self, y: torch.Tensor, *, gelu: bool = False, limit: float = 0.0) -> torch.Tensor:
        source, form = wide(y.numpy()), op.FORMS["gelu_tanh" if gelu else "clamped_silu" if limit else "silu"]
        return _rounded((len(y), y.shape[1] // 2), 32, lambda to: op.Gate(matrix(source), to, form, limit))

    def heads(self, y: torch.Tensor, how: HeadOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (M, width), H, K, D = y.shape, how.heads, how.kv_heads, how.dim
        cache = _cache(how)
        slots, positions = np.array(how.slots, np.int32), np.array(how.positions, np.int32)
        cache.begin(slots, positions)
        machine = Machine(M)
        machine.inputs[1][:M], machine.inputs[2][:M] = slots, positions
        rows = aligned_zeros((M, width + 16), np.float32)
        rows[:, :width] = y.numpy()
        turns = [np.ascontiguousarray(table.numpy()) for table in (how.cos, how.sin)]
        norms = [vector(weight.numpy()) for weight in how.norms or ()]
        basis = [np.ascontiguousarray(part.numpy()) for part in how.basis or ()]
        at = [[address(array) for array in arrays] or [0, 0] for arrays in (turns, norms, basis)]
        half = turns[0].shape[1]
        growth = None if how.growth is None else np.ascontiguousarray(how.growth.numpy())
        q = matrix(rows)
        kv = q._replace(at=q.at + 4 * H * D)
        own = op.Heads(q, kv, H, K, D, half, *at[0], *at[1], how.eps, 0.5, cache.stored(1), *at[2])
        machine.run(own._replace(norm_last=how.norm_last, growth=0 if growth is None else address(growth)))
        stored = {
            part: [cache.store.window(part, slot, at + 1)[1][:, at] for slot, at in zip(slots, positions, strict=True)]
            for part in ("keys", "values")
        }
        q = 2 * torch.from_numpy(rows[:, : H * D].reshape(M, H, D).copy())
        k, v = (torch.from_numpy(np.stack(each)).float() for each in stored.values())
        return q, k, v

    def select(self, x: torch.Tensor, how: Selector) -> tuple[torch.Tensor, bool]:
        source, chosen, recalls = wide(x.numpy()), _room(x, how.k_chunk), aligned_zeros((max(16, len(x)),), np.float32)
        machine = Machine(len(x))
        machine.inputs[2, : len(x)] = how.positions or range(len(x))
        # Of one row, the product that follows makes the selection itself, unless recall is measured.
        own = _selection(source, x.shape[1], chosen, how)._replace(measure=len(x) == 1, hits=address(recalls))
        machine.run(own)
        return torch.from_numpy(chosen).long(), machine.failed

    def compensate(self, linear: PackedLinear, x: torch.Tensor, k_chunk: int) -> torch.Tensor:
        (N, K), rows = linear.shape, len(x)
        assert linear.rank_maximum is not None
        k = budget.total_budget(K, k_chunk)
        how = Selector(mode="approx", k_chunk=k_chunk, buckets=budget.buckets(linear.rank_maximum, k))
        tiled, nothing = tile_linear(linear, Arena()), Activations(rows, K, linear.group_size)
        source, chosen, out = wide(x.numpy()), _room(x, k_chunk), wide(np.zeros((rows, N), np.float32))
        plain = op.Linear(tiled.weights, nothing.places, False, matrix(out), bias=0, accumulate=False, total=k)
        residual = PlacedResidual(linear)
        product = plain._replace(residual=residual.place, values=matrix(source), chosen=matrix(chosen))
        Machine(rows).run(_selection(source, K, chosen, how), product)
        return torch.from_numpy(out[:rows, :N].copy())

    def product(self, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_groups(x, linear.group_size)
        assert torch.equal(dequantize_groups(codes, scales, linear.group_size), x)
        found = _product(linear, codes, scales, np.zeros((len(x), linear.shape[0])))
        before = np.random.default_rng(0).standard_normal(found.shape).astype(np.float32)
        assert_close(_product(linear, codes, scales, before, accumulate=True), before + found.numpy(), "sums")
        return found

    def product_tolerance(self, rows: int) -> str | Tolerance:
        return "sums"

    def whole_product(self, linear: PackedLinear, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _product(linear, codes, scales, np.zeros((len(codes), linear.shape[0])))


def _rounded(shape: Any, group: int, instruction: Any) -> torch.Tensor:
    """What an instruction writes [M, K], which it also rounds to INT8, and zeros behind it."""
    rows, K = shape
    quantized, out = Activations(rows, K, group), wide(np.full((rows, padded(K, 32)), _POISON, np.float32))
    Machine(rows).run(instruction(op.Input(K, False, matrix(out), quantized.places, group_blocks=group // 32)))
    values = torch.from_numpy(out[:rows, :K].copy())
    whole = values.isfinite().all(dim=1)
    assert not out[:rows, K : padded(K, 32)][whole.numpy()].any()
    if bool(whole.all()):
        check_quantized(quantized, values)
    return values


def check_quantized(quantized: Activations, values: torch.Tensor) -> None:
    """Codes and scales are what the reference makes of the very values that were written."""
    codes, scales = quantize_groups(values, quantized.group)
    found, found_scales, shifts, sums = quantized.read()
    # One division apart, so a code may fall on the other side of a tie.
    apart = np.abs(found[:, : quantized.width].astype(int) - codes.numpy())
    assert apart.max() <= 1
    assert (apart != 0).mean() < 1e-3
    assert not found[:, quantized.width :].any()
    assert_close(found_scales, scales.numpy(), "sums")
    assert np.array_equal(sums, np.add.reduceat(found.astype(int), range(0, quantized.K, quantized.group), axis=1))
    assert_close(shifts, -found_scales * sums, "sums")


def _cache(how: HeadOptions) -> CpuCache:
    spec = make_spec(num_heads=how.heads, num_kv_heads=how.kv_heads, head_dim=how.dim)
    return CpuCache(spec, DecoderOptions(kv="int4", context=64, slots=max(how.slots) + 1, max_rows=16), 2)


def _room(x: torch.Tensor, k_chunk: int) -> npt.NDArray[np.int32]:
    """Where the channels that rows choose go."""
    return aligned_zeros((len(x), budget.total_budget(x.shape[1], k_chunk)), np.int32)


def _selection(source: npt.NDArray[np.float32], K: int, chosen: npt.NDArray[np.int32], how: Selector) -> op.Select:
    edges = how.buckets
    return op.Select(
        x=matrix(source),
        width=K,
        wanted=False,
        k_chunk=how.k_chunk,
        total=chosen.shape[1],
        chosen=matrix(chosen),
        mode=MODES[how.mode],
        border=op.Border(edges.b15, edges.upper_scale, edges.lower_scale),
        static=address(how.static),
        seed=(how.seed + 2**63) % 2**64 - 2**63,  # a word of 64 bits, with a sign
        layer=how.layer,
        measure=False,
        hits=0,
    )


def _product(
    linear: PackedLinear, codes: torch.Tensor, scales: torch.Tensor, before: Any, *, accumulate: bool = False
) -> torch.Tensor:
    rows, (N, K) = len(codes), linear.shape
    inputs, tiled = Activations(rows, K, linear.group_size), tile_linear(linear, Arena())
    inputs.fill(codes.numpy(), scales.numpy())
    bias = None if linear.bias is None else vector(linear.bias)
    out = wide(before, rows)
    where = (inputs.places, False, matrix(out))
    Machine(rows).run(op.Linear(tiled.weights, *where, bias=address(bias), accumulate=accumulate))
    assert np.isnan(out[rows:]).all()
    return torch.from_numpy(out[:rows, :N].copy())
