"""Memory of an absent card: tensors without data, counted as torch's caching allocator would.

`torch.device("meta")` gives shapes without memory, and kernels that do nothing take them. So everything that the host
allocates for a model of any size is counted: when, how much, and whether it is given back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
_ROUND, _SMALL, _SMALL_SEGMENT = 512, 1 << 20, 2 << 20
_MIDDLE, _MIDDLE_SEGMENT, _LARGE_ROUND = 10 << 20, 20 << 20, 2 << 20


@dataclass
class Segment:
    """What the allocator asked the driver for: blocks as (offset, bytes), free between them."""

    size: int
    small: bool
    blocks: list[tuple[int, int]] = field(default_factory=list)

    def place(self, nbytes: int) -> int | None:
        """Where a block of that size finds room first."""
        at = 0
        for start, held in sorted(self.blocks):
            if start - at >= nbytes:
                return at
            at = start + held
        return at if self.size - at >= nbytes else None


class Card(TorchDispatchMode):
    """Counts tensors of the meta device while it is entered.

    Segments are as in torch's c10/cuda/CUDACachingAllocator.cpp: blocks of up to 1 MiB in segments of 2, up to 10 in
    segments of 20, larger ones in segments of their own, rounded up to 2 MiB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requested = self.peak = 0
        self.launches: list[str] = []
        """Kernels that were launched, `add_norm`."""
        self._segments: list[Segment] = []
        self._held: dict[int, None] = {}

    @property
    def reserved(self) -> int:
        """Bytes that the driver gave."""
        return sum(segment.size for segment in self._segments)

    def empty_cache(self) -> None:
        """Return segments in which nothing is."""
        self._segments = [segment for segment in self._segments if segment.blocks]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held or not storage.nbytes():
            return
        self._held[key] = None
        nbytes = -(-storage.nbytes() // _ROUND) * _ROUND
        segment, at = self._find(nbytes)
        segment.blocks.append((at, nbytes))
        self.requested += nbytes
        self.peak = max(self.peak, self.requested)
        weakref.finalize(storage, self._free, key, segment, (at, nbytes))

    def _find(self, nbytes: int) -> tuple[Segment, int]:
        small = nbytes <= _SMALL
        fitting = [(s.size, i, s.place(nbytes)) for i, s in enumerate(self._segments) if s.small == small]
        for _, i, at in sorted(found for found in fitting if found[2] is not None):
            return self._segments[i], at or 0
        size = _SMALL_SEGMENT if small else _MIDDLE_SEGMENT
        if nbytes >= _MIDDLE:
            size = -(-nbytes // _LARGE_ROUND) * _LARGE_ROUND
        self._segments.append(Segment(size, small))
        return self._segments[-1], 0

    def _free(self, key: int, segment: Segment, block: tuple[int, int]) -> None:
        del self._held[key]
        segment.blocks.remove(block)
        self.requested -= block[1]


@contextlib.contextmanager
def counted() -> Iterator[Card]:
    """A card whose kernels do nothing; for models that are placed on `META`."""
    from triton.runtime import interpreter, jit

    card = Card()

    def launch(kernel: Any, *_arguments: Any, **_options: Any) -> None:
        card.launches.append(kernel.fn.__name__.removeprefix("_").removesuffix("_kernel"))

    with pytest.MonkeyPatch.context() as patch:
        for made in (jit.JITFunction, interpreter.InterpretedFunction):
            patch.setattr(made, "__getitem__", lambda kernel, _grid: partial(launch, kernel), raising=False)
        with card:
            yield card
