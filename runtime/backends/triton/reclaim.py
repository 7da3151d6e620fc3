"""Return of freed memory, which torch keeps, to the card and to the system."""

from __future__ import annotations

import gc

import torch


def return_cached() -> None:
    """Empty torch's caches of device memory and of page-locked memory; does nothing where no card is in use.

    torch keeps what it frees for itself. Other programs, the next memory plan and the next model would not see it.

    Raises:
        RuntimeError: the card stopped working in this process.
    """
    gc.collect()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    empty_host_cache()


def empty_host_cache() -> None:
    """Return page-locked memory that nothing uses. Versions of torch before 2.13 have no public name for it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001
    if empty is not None:
        empty()
