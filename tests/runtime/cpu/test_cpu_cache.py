"""The CPU backend's cache against the reference's: what is stored, and what attention makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime.cpu import instructions as op
from runtime.cpu.cache import CpuCache
from runtime.cpu.layout import aligned_zeros, padded
from runtime.decoder import DecoderOptions
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.kv.reference.cache import ReferenceCache

torch.set_num_threads(1)

# What integer queries and weights may add to the error of the output, as a share of the output's own size (root mean
# square): one plane of INT8 where codes have 4 bits or fewer, two planes where they have 8.
TOLERANCE = {"fp16": 5e-6, "int8": 6e-4, "hierarchical": 3e-4}
ONE_PLANE = 5e-2


class Attention:
    """One layer's heads, cache and attention, run as instructions and by the reference."""

    def __init__(self, machine: Callable[..., Any], kind: KVKind, **sizes: Any) -> None:
        self.heads, self.kv_heads, self.dim = sizes.get("heads", 4), sizes.get("kv_heads", 2), sizes.get("dim", 64)
        self.window, self.layers = sizes.get("window"), 2
        options = DecoderOptions(
            kv=kind, context=sizes.get("context", 1024), slots=sizes.get("slots", 2), max_rows=sizes.get("max_rows", 16)
        )
        spec: Any = type("Spec", (), {"num_layers": self.layers, "num_kv_heads": self.kv_heads, "head_dim": self.dim})()
        self.cpu = CpuCache(spec, options, 2)
        self.reference = ReferenceCache(
            KINDS[kind], spec, context=options.context, slots=options.slots, max_rows=options.max_rows
        )
        self.machine, self.rows = machine, options.max_rows
        self.splits = sizes.get("splits", 1)
        self.rng = np.random.default_rng(0)
        self.channel_scale = np.ones(self.dim, np.float32)
        self.draft = False

    def step(
        self, slots: list[int], positions: list[int], x: npt.NDArray[np.float32] | None = None, layer: int = 1
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Append random rows to both and attend. Returns both outputs [M, H, D]."""
        M, H, K, D = len(slots), self.heads, self.kv_heads, self.dim
        slot, position = np.array(slots, np.int32), np.array(positions, np.int32)
        for cache in (self.cpu, self.reference):
            cache.begin(slot, position)
        if x is None:
            x = self.rng.standard_normal((M, H + 2 * K, D)).astype(np.float32)
            x[:, H : H + K] *= self.channel_scale
        expected = self._reference(x, slot, position, layer)
        return self._compiled(x, slot, position, layer), expected

    def _reference(self, x: Any, slots: Any, positions: Any, layer: int) -> npt.NDArray[np.float32]:
        q, k, v = (torch.from_numpy(part) for part in np.split(x, [self.heads, self.heads + self.kv_heads], axis=1))
        slot, position = torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(positions.astype(np.int64))
        self.reference.append(layer, slot, position, k, v)
        return self.reference.attend(layer, q, slot, position, self.window, draft=self.draft).numpy()

    def _compiled(self, x: Any, slots: Any, positions: Any, layer: int) -> npt.NDArray[np.float32]:
        M, H, K, D = len(slots), self.heads, self.kv_heads, self.dim
        machine = self.machine(M)
        machine.scratch = aligned_zeros((2, 1 << 20), np.uint8)
        machine.control[op.SCRATCH], machine.control[op.SCRATCH_STRIDE] = machine.scratch.ctypes.data, 1 << 20
        machine.inputs[1][:M], machine.inputs[2][:M] = slots, positions
        runs, row = [], 0
        while row < M:
            count = 1
            while row + count < M and slots[row + count] == slots[row] and count < 8:
                count += 1
            runs += [row, count]
            row += count
        machine.inputs[4][: len(runs)] = runs
        machine.control[op.RUNS], machine.control[op.SPLITS] = len(runs) // 2, self.splits
        machine.control[op.DRAFT] = int(self.draft)
        qkv = aligned_zeros((M, (H + 2 * K) * D + 16), np.float32)
        qkv[:, : (H + 2 * K) * D] = x.reshape(M, -1)
        cache = dict(zip(("cache", "pages", "window_keys", "window_values"), self.cpu.addresses(layer), strict=True))
        shape = {"qkv": qkv, "stride": qkv.strides[0], "heads": H, "kv_heads": K, "dim": D}
        machine.run(op.HEADS, **shape, half=0, scale=D**-0.5, **cache)
        partial = aligned_zeros((M * self.splits * H * (padded(D, 16) + 16),), np.float32)
        partial[:] = np.nan
        machine.run(op.ATTEND, **shape, window=self.window or 0, out=partial, **cache)
        wide = padded(H * D, 32)
        out, codes = aligned_zeros((M, wide), np.float32), aligned_zeros((padded(M, 16), wide), np.int8)
        scales = aligned_zeros((2, padded(M, 16), wide // 32), np.float32)
        machine.run(
            op.MERGE,
            x=partial,
            width=H * D,
            out=out,
            out_stride=out.strides[0],
            codes=codes,
            scales=scales[0],
            shifts=scales[1],
            group_blocks=1,
            heads=H,
            dim=D,
        )
        return out[:, : H * D].reshape(M, H, D)

    def check_stored(self) -> None:
        """Assert that pages and windows hold the same, bit for bit."""
        for slot in range(2):
            pages = self.cpu.table.held(slot)
            assert pages == self.reference.table.held(slot)
            valid = self.cpu.length(slot)
            for part in PARTS:
                mine = self.cpu.store.fields(part, pages)
                theirs = self.reference.store.stored(part, 1, pages)
                for name, array in theirs.items():
                    expected = array.numpy()
                    actual = mine[name][1]
                    if not self.cpu.kind.windowed and len(pages):
                        unused = len(pages) * self.cpu.kind.page - valid
                        if unused:
                            actual = actual.copy()
                            actual[-1, :, -unused:] = expected[-1, :, -unused:]
                    np.testing.assert_array_equal(actual, expected, err_msg=name)


def distance(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Error relative to the root mean square of what is expected."""
    assert np.isfinite(actual).all()
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


EVERY: list[KVKind] = list(KINDS)


@pytest.mark.parametrize("kind", EVERY)
def test_steps_of_every_size(machine: Callable[..., Any], kind: KVKind) -> None:
    attention = Attention(machine, kind, splits=2)
    worst, length = 0.0, 0
    for rows in (1, 7, 16, 16, 16, 1, 1, 16, 3, *[16] * 26, 1, 4):
        worst = max(worst, distance(*attention.step([0] * rows, list(range(length, length + rows)))))
        length += rows
    attention.check_stored()
    assert worst < TOLERANCE.get(kind, ONE_PLANE)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(3, 3, 32, None), (2, 1, 20, 70), (8, 1, 128, None), (10, 2, 80, 200), (6, 1, 96, 5)],
    ids=["D32", "D20-window70", "D128-8heads", "D80-window200", "D96-window5"],
)
def test_shapes_and_sliding_windows(
    machine: Callable[..., Any], kind: KVKind, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    attention = Attention(machine, kind, heads=heads, kv_heads=kv_heads, dim=dim, window=window, splits=3)
    attention.channel_scale[dim // 2] = 12
    for start in range(0, 320, 16):
        attention.step([1] * 16, list(range(start, start + 16)))
    worst = max(distance(*attention.step([1], [320 + i])) for i in range(3))
    attention.check_stored()
    assert worst < TOLERANCE.get(kind, 1.5 * ONE_PLANE)


@pytest.mark.parametrize("kind", EVERY)
def test_slots_of_different_length_are_cut_back_and_forked(machine: Callable[..., Any], kind: KVKind) -> None:
    attention = Attention(machine, kind)
    for start in range(0, 288, 8):  # The slots take turns, so their pages are mixed.
        rows = list(range(start, start + 8))
        attention.step([0] * 8, rows)
        attention.step([1] * 8, rows)
    for start, other in ((283, 280), (200, 279), (250, 100)):
        for cache in (attention.cpu, attention.reference):
            for slot, length in ((0, start), (1, other)):
                if length < cache.length(slot):
                    cache.trim(slot, length)
        lengths = [attention.cpu.length(slot) for slot in range(2)]
        positions = [*range(lengths[0], lengths[0] + 5), *range(lengths[1], lengths[1] + 3)]
        assert distance(*attention.step([0] * 5 + [1] * 3, positions)) < TOLERANCE.get(kind, ONE_PLANE)
        if start != 250:
            more = list(range(lengths[0] + 5, lengths[0] + 60))
            for at in range(0, len(more), 11):
                attention.step([0] * 11, more[at : at + 11])
        attention.check_stored()
    for cache in (attention.cpu, attention.reference):
        cache.fork(0, 1, 150)
    assert distance(*attention.step([1], [150])) < TOLERANCE.get(kind, ONE_PLANE)
    attention.check_stored()


def test_a_draft_reads_the_upper_plane_alone(machine: Callable[..., Any]) -> None:
    attention = Attention(machine, "hierarchical")
    for start in range(0, 400, 16):
        attention.step([0] * 16, list(range(start, start + 16)))
    attention.draft = True
    actual, expected = attention.step([0] * 4, list(range(400, 404)))
    assert distance(actual, expected) < ONE_PLANE
    assert attention.cpu.table.count(0) == 2


def test_a_head_of_equal_numbers_and_of_zeros(machine: Callable[..., Any]) -> None:
    for kind in EVERY:
        attention = Attention(machine, kind)
        for value in (0.0, -3.0):
            x = np.full((16, 8, 64), value, np.float32)
            for start in range(0, 288, 16):
                actual, expected = attention.step([0] * 16, list(range(start, start + 16)), x)
                np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
        attention.check_stored()
