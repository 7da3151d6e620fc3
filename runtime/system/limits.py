"""Limits of a process on itself."""

from __future__ import annotations

import contextlib


def limit_memory(most: int) -> None:
    """Let this process allocate no more memory, where the system supports such a limit.

    Args:
        most: Bytes of address space.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit, macOS refuses it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))
