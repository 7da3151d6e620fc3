"""Into how many parts an instruction is cut: enough that threads end together, and few, for taking one costs time.

A thread takes a part in some 50 to 100 ns. With parts of several microseconds that is a percent, and a thread that ends
first waits for half a part on average.
"""

from __future__ import annotations

from runtime.backends.cpu.data import instructions as op

_GRAIN_BYTES = 96 << 10
"""Bytes of weights of a part of a product: 5 to 10 microseconds of what memory gives one core."""
_ALONE_BYTES = 16 << 10
"""Bytes of weights that one thread reads in less time than another needs to join."""
_MOST = 8
"""Parts for each thread at most: more would not make them end closer together."""
_ALONE_CHANNELS = 4096
"""Channels that one thread norms, gates, chooses from or rotates in less time than another needs to join."""
_MANY = 4
"""Parts for each thread of a product of several rows."""


def parts_of(instruction: op.Instruction, threads: int) -> tuple[int, int]:
    """How to cut an instruction.

    Args:
        instruction: What is to be done.
        threads: Threads that share it.

    Returns:
        Parts in a step of one row, and in one of several rows; (0, 0): as many as attention has items in the step.
    """
    match instruction:
        case op.Linear(weights=weights):
            return _product(weights, threads)
        case op.Attend():
            return 0, 0
        case op.Norm(to=to) | op.Gate(to=to):
            return _even(to.width, threads), threads
        case op.Select(width=width, measure=measure):
            return 1 if measure else _even(width, threads), threads
        case op.Heads(heads=heads, kv_heads=kv_heads, dim=dim):
            return _even((heads + 2 * kv_heads) * dim, threads), threads
        case op.Flush() | op.Restore():
            return threads, threads
    return 1, threads


def _even(channels: int, threads: int) -> int:
    return 1 if channels < _ALONE_CHANNELS else threads


def _product(weights: op.Weights, threads: int) -> tuple[int, int]:
    size = weights.tiles * weights.blocks * 16 * 32 * weights.bits // 8
    if size < _ALONE_BYTES:
        return 1, threads
    each = min(_MOST, max(1, round(size / (_GRAIN_BYTES * threads))))
    return min(weights.tiles, threads * each), min(weights.tiles, threads * _MANY)
