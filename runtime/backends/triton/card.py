"""Trial launches on the card, its bandwidth, and the return of memory that torch caches.

A trial launch needs everything that others need: Triton's compiler, the C compiler that builds the launcher, and the
driver. A cooperative one shows whether compensation can select and fetch in one kernel; some drivers refuse those
(shared and virtual cards), and then it takes two. Bandwidth is measured because laptops often have fewer lanes than the
data sheet says, and slots share lanes.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import knobs

from runtime.system.private_files import kernel_folder, private_code_folder

PROGRAMS = 2
_BYTES = 64 << 20
_REPEATS = 8
_READ_BYTES = 512 << 20
"""Several times the L2 cache of any card."""


@triton.jit
def _count_kernel(counter_ptr):
    """Every program adds one to counter int32 [1]."""
    tl.atomic_add(counter_ptr, 1)


def launch(device: torch.device | str, *, cooperative: bool = False) -> bool:
    """Launch, wait, and check that every program ran."""
    if torch.device(device).type == "cuda":  # the interpreter caches nothing
        keep_in_own_folder()
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    _count_kernel[(PROGRAMS,)](counter, num_warps=1, launch_cooperative_grid=cooperative)
    return int(counter) == PROGRAMS


def keep_in_own_folder() -> None:
    """Make Triton cache compiled kernels, which it loads unchecked, in a folder that only this user can write to.

    Its default, `~/.triton`, is as open as the user's umask makes it. A folder that the user names is checked.
    """
    named = next((name for name in ("TRITON_CACHE_DIR", "TRITON_HOME") if os.environ.get(name)), None)
    found = kernel_folder("triton") if named is None else private_code_folder(Path(knobs.cache.dir), named)
    knobs.cache.dir = str(found)


def host_to_device_gb_s(device: torch.device | str = "cuda", *, nbytes: int = _BYTES) -> float:
    """Bandwidth of copies from page-locked memory to the device, in 10^9 bytes per second: the second fastest of a few.

    Raises:
        RuntimeError: the driver refused page-locked memory, or the device does not respond.
    """
    device = torch.device(device)
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = _second_fastest(partial(target.copy_, source, non_blocking=True), device)
    del source, target
    if device.type == "cuda":
        return_cached()
    return nbytes / seconds / 1e9


def device_read_gb_s(device: torch.device | str = "cuda", *, nbytes: int = _READ_BYTES) -> float:
    """Bandwidth of the device's memory in 10^9 bytes per second: of sums, or of copies, whose writes count, if faster.

    Raises:
        RuntimeError: too little memory is free, or the device does not respond.
    """
    device = torch.device(device)
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    added = _second_fastest(source.sum, device)
    copied = _second_fastest(partial(target.copy_, source), device)
    del source, target
    if device.type == "cuda":
        return_cached()
    return nbytes * max(1 / added, 2 / copied) / 1e9


def _second_fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the second fastest of a few rounds."""
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[1]


def return_cached() -> None:
    """Empty torch's caches of device memory and page-locked memory; does nothing without a card in use.

    torch keeps freed memory for itself, invisible to other programs, the next memory plan and the next model. Raises
    RuntimeError if the card stopped working in this process.
    """
    gc.collect()
    if not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    empty_host_cache()


def empty_host_cache() -> None:
    """Return unused page-locked memory. torch before 2.13 has no public name for this."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001
    if empty is not None:
        empty()
