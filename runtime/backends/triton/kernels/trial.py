"""The smallest launch that shows whether kernels can run: its programs count themselves.

It takes what every other launch takes, Triton's compiler, the C compiler that builds the launcher, and the driver; and
it is cooperative, as compensation is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead

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


def ahead() -> tuple[Ahead, ...]:
    """The kernel."""
    from runtime.backends.triton.ahead import Ahead

    return (
        Ahead(name="trial", kernel=_count_kernel, signature={"counter_ptr": "*i32"}, num_warps=1, cooperative=True),
    )
