"""Minimal launches that show whether kernels can run: their programs count themselves.

A launch needs everything that others need: Triton's compiler, the C compiler that builds the launcher, and the driver.
A cooperative one shows whether compensation can select and fetch in one kernel; some drivers refuse those (shared and
virtual cards), and then it takes two.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.errors import TritonError

from runtime.backends.triton.failures import first_line
from runtime.system.private_files import kernel_folder, private_code_folder

PROGRAMS = 2


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


@cache
def refused_cooperation(device: torch.device) -> str | None:
    """Why programs cannot wait for each other on a device; None if they can."""
    try:
        return None if launch(device, cooperative=True) else "a tiny cooperative kernel gave a wrong result"
    except (TritonError, RuntimeError) as error:
        return first_line(error)


def keep_in_own_folder() -> None:
    """Make Triton cache compiled kernels, which it loads unchecked, in a folder that only this user can write to.

    Its default, `~/.triton`, is as open as the user's umask makes it. A folder that the user names is checked.
    """
    named = next((name for name in ("TRITON_CACHE_DIR", "TRITON_HOME") if os.environ.get(name)), None)
    found = kernel_folder("triton") if named is None else private_code_folder(Path(knobs.cache.dir), named)
    knobs.cache.dir = str(found)
