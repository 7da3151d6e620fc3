"""Bandwidth measurement from main memory to this GPU.

Laptops often have fewer lanes than the data sheet says, and slots share lanes. Compensation depends on the measured
value.
"""

from __future__ import annotations

import time

import torch

from runtime.backends.triton.reclaim import return_cached

_BYTES = 64 << 20
_REPEATS = 8


def host_to_device_gb_s(device: torch.device | str = "cuda", *, nbytes: int = _BYTES) -> float:
    """Copy page-locked memory to the device a few times; returns the speed of the second fastest copy.

    Args:
        device: A CUDA device, or `cpu` for tests.
        nbytes: Bytes of a copy.

    Returns:
        10^9 bytes per second.

    Raises:
        RuntimeError: the driver refused page-locked memory, or the device does not respond.
    """
    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    del source, target
    if on_gpu:
        return_cached()
    return nbytes / sorted(seconds)[1] / 1e9
