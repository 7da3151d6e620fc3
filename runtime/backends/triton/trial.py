"""The smallest launch that shows whether kernels can run: its programs count themselves.

It takes what every other launch takes, Triton's compiler, the C compiler that builds the launcher, and the driver; and
it is cooperative, as compensation is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 2


@triton.jit
def _count_kernel(counter_ptr):
    """Every program adds one to counter int32 [1]."""
    tl.atomic_add(counter_ptr, 1)


def launch(device: torch.device | str) -> bool:
    """Launch, wait, and look whether every program ran."""
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    _count_kernel[(PROGRAMS,)](counter, num_warps=1, launch_cooperative_grid=True)
    return int(counter) == PROGRAMS
