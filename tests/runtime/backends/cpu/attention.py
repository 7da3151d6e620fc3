"""Attention as instructions of the CPU backend, so that tests exercise the very machine code that models run on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.backends.cpu.cache import CpuCache
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import RUN_ROWS, padded
from runtime.backends.decoder import DecoderOptions
from runtime.backends.reference.cache import ReferenceCache
from runtime.kv.kinds import KINDS, PARTS, KVKind
from tests.close import Tolerance, assert_close
from tests.guarded import aligned_zeros
from tests.runtime.backends.cpu.machine import Activations, Machine, matrix
from tests.runtime.conftest import make_spec

CORRECTIONS = Tolerance(rtol=2e-3, atol=2e-3, why="factors in half precision, from sums in another order")


class Attention:
    """One layer's heads, cache and attention, run as instructions and by the reference."""

    def __init__(self, kind: KVKind, **sizes: Any) -> None:
        self.heads, self.kv_heads, self.dim = sizes.get("heads", 4), sizes.get("kv_heads", 2), sizes.get("dim", 64)
        self.window, self.layers = sizes.get("window"), 2
        options = DecoderOptions(
            kv=kind, context=sizes.get("context", 1024), slots=sizes.get("slots", 2), max_rows=sizes.get("max_rows", 16)
        )
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.dim}
        spec = make_spec(num_layers=self.layers, windows=(self.window,) * self.layers, **heads)
        self.cpu = CpuCache(spec, options, 2)
        self.reference = ReferenceCache(
            KINDS[kind], spec, context=options.context, slots=options.slots, max_rows=options.max_rows
        )
        self.splits = sizes.get("splits", 1)
        self.rng = np.random.default_rng(0)
        self.channel_scale = np.ones(self.dim, np.float32)
        """Of the keys' channels."""
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
        return self.compiled(x, slot, position, layer), expected

    def append(self, slot: int, x: npt.NDArray[np.float32]) -> None:
        """Append rows to both without attending to them."""
        first = self.cpu.length(slot)
        slots = np.full(len(x), slot, np.int32)
        positions = np.arange(first, first + len(x), dtype=np.int32)
        for cache in (self.cpu, self.reference):
            cache.begin(slots, positions)
        self._reference(x, slots, positions, 1, attend=False)
        self.compiled(x, slots, positions, 1, attend=False)

    def _reference(
        self, x: Any, slots: Any, positions: Any, layer: int, *, attend: bool = True
    ) -> npt.NDArray[np.float32]:
        q, k, v = (torch.from_numpy(part) for part in np.split(x, [self.heads, self.heads + self.kv_heads], axis=1))
        slot, position = torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(positions.astype(np.int64))
        self.reference.append(layer, slot, position, k, v)
        if not attend:
            return q.numpy()
        return self.reference.attend(layer, q, slot, position, self.window, draft=self.draft).numpy()

    def compiled(
        self, x: Any, slots: Any, positions: Any, layer: int, *, attend: bool = True
    ) -> npt.NDArray[np.float32]:
        """Run the CPU backend's instructions for rows that its cache has begun. Returns its output [M, H, D]."""
        M, H, K, D = len(slots), self.heads, self.kv_heads, self.dim
        machine = Machine(M)
        machine.inputs[1][:M], machine.inputs[2][:M] = slots, positions
        runs, row = [], 0
        while row < M:
            count = 1
            while row + count < M and slots[row + count] == slots[row] and count < RUN_ROWS:
                count += 1
            runs += [row, count]
            row += count
        machine.inputs[4][: len(runs)] = runs
        machine.step["runs"], machine.step["splits"], machine.step["draft"] = len(runs) // 2, self.splits, self.draft
        qkv = aligned_zeros((M, (H + 2 * K) * D + 16), np.float32)
        qkv[:, : (H + 2 * K) * D] = x.reshape(M, -1)
        stored, rows = self.cpu.stored(layer), matrix(qkv)
        machine.run(op.Heads(rows, rows._replace(at=rows.at + 4 * H * D), H, K, D, 0, 0, 0, 0, 0, 0.0, D**-0.5, stored))
        if not attend:
            return x
        partial = aligned_zeros((M * self.splits * H * (padded(D, 16) + 16),), np.float32)
        partial[:] = np.nan
        at = int(partial.ctypes.data)
        machine.run(op.Attend(rows, H, K, D, self.window or 0, RUN_ROWS, stored, at, self.cpu.exact(layer)))
        out, rounded = aligned_zeros((M, padded(H * D, 32)), np.float32), Activations(M, H * D, 32)
        machine.run(op.Merge(at, op.Input(H * D, False, matrix(out), rounded.places, 1), H, D, D))
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
                    if name in ("a", "b", "outliers"):  # sums that are added up in another order
                        assert_close(actual, expected, CORRECTIONS, what=name)
                        continue
                    np.testing.assert_array_equal(actual, expected, err_msg=name)


def distance(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Error relative to the root mean square of what is expected."""
    assert np.isfinite(actual).all()
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))
