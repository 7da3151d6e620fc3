"""The device's best bandwidth: copies within its memory, reads of it, and reads of the host's memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.lab.gpu.clock import race
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes

BLOCK = 4096
"""Words that a block requests together: 16 KiB."""


@triton.jit
def _read_kernel(source_ptr, out_ptr, words, BLOCK: tl.constexpr):
    """Read words as n blocks do that have nothing else to do; XOR them so that no load is left out."""
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(pid * BLOCK, words, tl.num_programs(0) * BLOCK):
        total ^= tl.load(source_ptr + start + offsets)
    tl.store(out_ptr + pid, tl.sum(total, axis=0))


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """Rows of GB/s: `copy`, `read`, `host copy engine`, `host zero-copy` by blocks."""
    part.add({"what": "copy", "gb_s": copy_gb_s(sizes, device), "counted": "bytes read and bytes written"})
    part.add({"what": "read", "gb_s": read_gb_s(sizes, device)})
    words = sizes.host_bytes // 4
    host = torch.ones(words, dtype=torch.int32, pin_memory=device.type == "cuda")
    here = torch.empty(words, dtype=torch.int32, device=device)
    seconds = race({"host": [lambda: here.copy_(host, non_blocking=True)]}, device, rounds=5)["host"].p50
    part.add({"what": "host copy engine", "gb_s": round(sizes.host_bytes / seconds / 1e9, 2)})
    for n_tb, gb_s in _read_gb_s(host, list(sizes.reading_n_tbs), sizes, device).items():
        part.add({"what": "host zero-copy", "n_tb": n_tb, "block_kib_in_flight": BLOCK * 4 // 1024, "gb_s": gb_s})


def copy_gb_s(sizes: Sizes, device: torch.device) -> float:
    """GB/s of copies within the device's memory, reads and writes counted."""
    source = torch.ones(sizes.copy_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    seconds = race({"copy": [lambda: target.copy_(source)]}, device, rounds=9)["copy"].p50
    return round(2 * sizes.copy_bytes / seconds / 1e9, 1)


def read_gb_s(sizes: Sizes, device: torch.device) -> float:
    """GB/s of a kernel that only reads the device's memory: the limit of products and attention, which hardly write.

    On an H200 a copy, though both its ways count, reaches less.
    """
    source = torch.ones(sizes.copy_bytes // 4, dtype=torch.int32, device=device)
    blocks = 8 * multiprocessors(device)
    return _read_gb_s(source, [blocks], sizes, device)[blocks]


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 1 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _read_gb_s(source: torch.Tensor, blocks: list[int], sizes: Sizes, device: torch.device) -> dict[int, float]:
    """GB/s that so and so many blocks read of `source`, a multiple of BLOCK words."""
    out = torch.empty(max(blocks), dtype=torch.int32, device=device)
    words = source.numel()

    def launch(n_tb: int) -> None:
        _read_kernel[(n_tb,)](source, out, words, BLOCK=BLOCK, num_warps=8)

    times = race({str(n): [lambda n=n: launch(n)] for n in blocks}, device, rounds=3, warm_rounds=1)
    return {n: round(source.nbytes / times[str(n)].p50 / 1e9, 2) for n in blocks}
