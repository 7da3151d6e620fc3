"""Measured read bandwidth of main memory: the physical limit of decoding on the processor.

Decoding one token reads every weight once, so tokens per second can't exceed this bandwidth divided by the bytes of the
weights. The measurement must be a limit that a good program can reach and none can exceed: all physical cores read at
once, each from four places with vector registers as accumulators, from a buffer larger than any cache. The second
fastest pass counts, because the fastest one sometimes profits from data cached by the previous pass.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.detect import boot_id, detect_cpu, detect_memory
from tuner.files import replacing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_FILE = "bandwidth.json"
_MIB = 1 << 20
_SMALLEST, _LARGEST = 512 * _MIB, 1024 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBandwidth:
    """A measured memory read bandwidth."""

    gb_s: float
    """Read in the second fastest pass, in 10^9 bytes per second."""
    threads: int
    """Threads that read at the same time."""
    buffer_bytes: int
    """Bytes read in one pass."""
    boot: str
    """Id of the boot during which it was measured; empty if the system has none."""

    def __post_init__(self) -> None:
        if not self.gb_s > 0 or self.threads < 1 or self.buffer_bytes < 1:
            raise ValueError(f"not a measured bandwidth: {self}")


def measure(threads: int, buffer_bytes: int, *, seconds: float = 0.25) -> ReadBandwidth:
    """Measure now.

    Args:
        threads: Threads to read with.
        buffer_bytes: Bytes of the buffer; several times the largest cache.
        seconds: Time for repeated passes; there are at least three.

    Raises:
        ValueError: fewer than one thread, or a buffer too small to share among them.
        MemoryError: the buffer does not fit.
    """
    if threads < 1 or buffer_bytes < threads * 4096:
        raise ValueError(f"cannot share a buffer of {buffer_bytes} bytes among {threads} threads")
    import numpy as np

    kernel = _kernel()
    words = buffer_bytes // 8 // threads // 4 * 4
    buffer = np.empty(words * threads, np.int64)
    parts = [buffer[i * words : (i + 1) * words] for i in range(threads)]
    buffer[:: 4096 // 8] = 1  # a page that was never written has no physical memory to read
    kernel(parts[0][:64])
    passes: list[float] = []
    end = time.perf_counter() + seconds
    while len(passes) < 3 or time.perf_counter() < end:
        passes.append(buffer.nbytes / _one_pass(kernel, parts) / 1e9)
    return ReadBandwidth(gb_s=sorted(passes)[-2], threads=threads, buffer_bytes=buffer.nbytes, boot=boot_id())


def read_bandwidth(folder: Path | None, *, fresh: bool = False) -> ReadBandwidth:
    """The bandwidth of this machine, measured once per boot and stored in `folder`.

    Other programs that run during a measurement only make it smaller, so of two measurements in one boot the larger one
    is closer to the limit and is kept.

    Args:
        folder: Where to store it; None stores nothing.
        fresh: Whether to measure again if this boot's measurement is stored.
    """
    remembered = _load(folder)
    if remembered is not None and not fresh:
        return remembered
    cpu, memory = detect_cpu(), detect_memory()
    cache_bytes = max((entry.size_bytes for entry in cpu.caches), default=0)
    wanted = min(max(16 * cache_bytes, _SMALLEST), _LARGEST, memory.available_bytes // 8)
    found = measure(cpu.usable_cores, max(wanted, 16 * _MIB))
    if remembered is not None and remembered.gb_s >= found.gb_s:
        return remembered
    _save(folder, found)
    return found


def _one_pass(kernel: Callable[[Any], Any], parts: list[npt.NDArray[np.int64]]) -> float:
    """Seconds from the first thread's start to the last one's end."""
    gate = threading.Barrier(len(parts))
    starts, ends = [0.0] * len(parts), [0.0] * len(parts)

    def work(index: int) -> None:
        gate.wait()
        starts[index] = time.perf_counter()
        kernel(parts[index])
        ends[index] = time.perf_counter()

    others = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, len(parts))]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()
    return max(ends) - min(starts)


@cache
def _kernel() -> Callable[[Any], Any]:
    """A function that sums an int64 array whose length is a multiple of 4, reading at four places at once."""
    import numba
    import numpy as np

    def read(a: Any) -> Any:
        quarter = a.size // 4
        s0 = s1 = s2 = s3 = np.int64(0)
        for i in range(quarter):
            s0 += a[i]
            s1 += a[quarter + i]
            s2 += a[2 * quarter + i]
            s3 += a[3 * quarter + i]
        return s0 + s1 + s2 + s3

    compiled: Callable[[Any], Any] = numba.njit("int64(int64[::1])", nogil=True)(read)
    return compiled


def _machine() -> dict[str, Any]:
    """The properties of the machine that a stored measurement must match."""
    return {"boot": boot_id(), "processor": detect_cpu().name, "node": platform.node()}


def _load(folder: Path | None) -> ReadBandwidth | None:
    if folder is None:
        return None
    try:
        data = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if data.pop("machine") != _machine() or not data["boot"]:
            return None
        if data.keys() != {field.name for field in fields(ReadBandwidth)}:
            return None
        return ReadBandwidth(**data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # nothing stored by this version: measure again


def _save(folder: Path | None, found: ReadBandwidth) -> None:
    """Store a measurement. If the folder can't be written, the next start measures again."""
    if folder is None:
        return
    text = json.dumps({**asdict(found), "machine": _machine()}, indent=1, sort_keys=True)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(folder / _FILE) as file:
            file.write(text.encode())
    except OSError:
        return
