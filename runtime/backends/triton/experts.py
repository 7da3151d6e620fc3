"""Matrices of a block's experts, on the device or in page-locked main memory, and which of them are where.

An expert's codes and groups are one *record*, laid out as any other matrix (`runtime.backends.triton.layout`). A table
on the device says where each expert's record is, so that one launch multiplies with those that the router chose,
wherever they are: a kernel reads a record in main memory as it reads residuals, over the bus, without a copy.

Where not all fit on the device, it is a cache of those used last (`runtime.backends.triton.kernels.expert_cache`),
which begins with those that most calibration tokens went to. Results do not depend on it, as the same kernel reads the
same numbers from either place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.packed import PackedLinear
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.residual import Allocate
from runtime.backends.triton.sizes import EXPERT_WORDS, RecordSizes, record_sizes
from runtime.errors import BackendError

SLAB_BYTES = 256 << 20
"""Records in main memory are page-locked so many bytes at a time: torch locks powers of two."""
_WORD = 4
_RUN_BYTES = _WORD * EXPERT_WORDS

Repack = Callable[[PackedLinear, torch.device], GpuLinear]
"""`runtime.backends.triton.layout.repack`."""


class HostRecords:
    """Page-locked memory for records, which all blocks share."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._slabs: list[torch.Tensor] = []  # what is left of each

    def take(self, words: int) -> torch.Tensor:
        """int32 [words], a multiple of `EXPERT_WORDS`, that begins at a whole line.

        Raises:
            PageLockError: the system refused.
        """
        for at, slab in enumerate(self._slabs):
            if slab.numel() >= words:
                self._slabs[at] = slab[words:]
                return slab[:words]
        size = max(SLAB_BYTES, 1 << (_WORD * words + _RUN_BYTES - 1).bit_length())
        fresh = _from_a_line(self._allocate(size).view(torch.int32))
        self._slabs.append(fresh[words:])
        return fresh[:words]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuExperts:
    """The matrices of one layer type of a block's experts."""

    first: GpuLinear
    """That of the first expert where it was loaded, a view without bias; all have its shape, bits and group size."""
    records: Mapping[int, torch.Tensor]
    """By place, int32 [words]: `GpuLinear.codes` and `GpuLinear.groups` of the expert that is there now, both filled up
    to multiples of `EXPERT_WORDS`."""
    resident: list[bool]  # By expert, whether its record was loaded onto the device
    places: torch.Tensor  # int64 [E] on the device: runs of `EXPERT_WORDS` words from `first`'s codes to each record
    sizes: RecordSizes  # Of a record
    bias: torch.Tensor | None = None  # float32 [E, N], always on the device; None: they have none

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.shape

    @property
    def count(self) -> int:
        return len(self.records)

    @property
    def nbytes(self) -> int:
        biases = 0 if self.bias is None else self.bias.nbytes
        return sum(self.resident) * self.sizes.nbytes + self.places.nbytes + biases

    @property
    def host_bytes(self) -> int:
        return (self.count - sum(self.resident)) * self.sizes.nbytes

    def of(self, expert: int) -> GpuLinear:
        bias = None if self.bias is None else self.bias[expert]
        return replace(_matrix(self.first, self.records[int(self.places[expert])], self.sizes), bias=bias)


def stack(
    experts: Sequence[PackedLinear],
    device: torch.device,
    repack: Repack,
    *,
    resident: Collection[int] | None = None,
    host: HostRecords | None = None,
) -> GpuExperts:
    """Load the matrices of a block's experts, one at a time; those that are not `resident`, None: all, into `host`.

    Raises:
        BackendError: they differ in shape, bits, groups or having a bias, or have what only other layers have.
        PageLockError: there is no page-locked memory for them.
    """
    one = experts[0]
    if one.per_token or one.codebook is not None:
        raise BackendError(f"{one.name}: the GPU takes experts of uniform codes or trellises: use the CPU backend")
    if len({(each.shape, each.bits, each.group_size, each.bias is None) for each in experts}) > 1:
        raise BackendError(
            f"{one.name}: experts of a block differ in shape, bits, groups or having a bias: use the CPU backend"
        )
    biases = [each.bias for each in experts if each.bias is not None]
    bias = torch.from_numpy(np.stack(biases)).to(device) if biases else None
    kept = [resident is None or expert in resident for expert in range(len(experts))]
    sizes = record_sizes(one.shape, one.bits, one.group_size, trellis=one.trellis)
    words = sum(kept) * sizes.words
    own = _from_a_line(torch.zeros(words + EXPERT_WORDS, dtype=torch.int32, device=device))
    records, first = [], None
    for packed, here in zip(experts, kept, strict=True):
        placed = repack(replace(packed, bias=None), device)
        if here:
            record, own = own[: sizes.words], own[sizes.words :]
        else:
            assert host is not None
            record = host.take(sizes.words)
        matrix = _matrix(replace(placed, name=one.name), record, sizes)
        for name in ("codes", "groups", "scales"):
            if (part := getattr(placed, name)) is not None:
                getattr(matrix, name).copy_(part)
        first = first or matrix
        records.append(record)
    assert first is not None
    base = first.codes.data_ptr()
    at = [(record.data_ptr() - base) // _RUN_BYTES for record in records]
    places, by_place = torch.tensor(at, dtype=torch.int64, device=device), dict(zip(at, records, strict=True))
    return GpuExperts(first=first, records=by_place, resident=kept, places=places, sizes=sizes, bias=bias)


def _matrix(like: GpuLinear, record: torch.Tensor, sizes: RecordSizes) -> GpuLinear:
    """The matrix of a record, a view; `like` has its shape, bits and group size, and tensors of such sizes."""
    codes, behind = record[: like.codes.numel()], record[sizes.code_words :]
    if like.scales is not None:
        return replace(like, codes=codes, scales=behind.view(torch.float16)[: like.shape[0]])
    assert like.groups is not None
    return replace(like, codes=codes, groups=behind[: like.groups.numel()].view(like.groups.shape))


def _from_a_line(words: torch.Tensor) -> torch.Tensor:
    """The same memory from its first whole run of `EXPERT_WORDS` words on."""
    return words[-words.data_ptr() % _RUN_BYTES // _WORD :]
