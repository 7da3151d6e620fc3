"""Returns memory cached by torch to the card and to the system."""

from __future__ import annotations

import gc

import torch


def return_cached() -> None:
    """Empty torch's caches of device memory and page-locked memory; does nothing without a card in use.

    torch keeps freed memory for itself, invisible to other programs, the next memory plan and the next model.

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
    """Return unused page-locked memory. torch before 2.13 has no public name for this."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001
    if empty is not None:
        empty()
