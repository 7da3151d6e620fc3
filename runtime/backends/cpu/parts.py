"""Number of parts of an instruction: enough for threads to finish together, but few, since taking a part costs time.

A thread takes a part in some 50 to 100 ns, and reading weights from memory is fastest in long runs.
"""

from __future__ import annotations

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.step import PARTS_OF_WEIGHTS, tiles_of_line

_ALONE_BYTES = 16 << 10
"""Bytes of weights that one thread reads in less time than another needs to join."""
_LARGE_BYTES = 256 << 10
"""From this many bytes of weights on, each thread gets a large part, with small ones at the end
(`share_of_weights`)."""
_ALONE_CHANNELS = 4096
"""Channels that one thread normalizes, gates or rotates in less time than another needs to join."""
_MANY = 4
"""Parts per thread of a product with several rows."""
_UNEVEN = 16
"""The same of a product with experts, which have different numbers of rows."""
_DOT = 16
"""Products of a router that take as long as a channel's norm."""


def parts_of(instruction: op.Instruction, threads: int) -> tuple[int, int]:
    """The number of parts of an instruction.

    Args:
        instruction: The instruction.
        threads: Threads that share it.

    Returns:
        Parts in a step of one row, and in one of several rows, as in `Header`.
    """
    match instruction:
        case op.Linear(weights=weights, residual=residual, kept=kept) if kept:
            return (_shared(weights, residual, threads),) * 2
        case op.Linear(weights=weights) | op.Panel(weights=weights):
            return _product(weights, threads)
        case op.Experts():
            return _experts(instruction, threads)
        case op.Score(scores=scores, channels=channels):
            return _even(scores * channels // _DOT, threads), threads * _MANY
        case op.Route():
            return 1, 1
        case op.Spread():
            return 1, threads
        case op.Select(routes=routes, measure=measure) if routes.counts:
            return (1, 1) if measure else (threads, threads)
        case op.GateExperts():
            return threads, threads
        case op.Attend():
            return 0, 0
        case op.Norm(to=to) | op.Gate(to=to):
            return _even(to.width, threads), threads
        case op.Select(measure=measure):
            return 1 if measure else op.BESIDE, threads
        case op.Heads(heads=heads, kv_heads=kv_heads, dim=dim):
            return _even((heads + 2 * kv_heads) * dim, threads), threads
        case op.Convolve(to=to):
            return (1, 1) if to.per_token else (_even(to.width, threads), threads)
        case op.Mix(channels=channels):
            return _even(channels, threads), threads
        case op.Recur(heads=heads):
            return min(heads, threads), min(heads, threads * _MANY)
        case op.Flush() | op.Restore():
            return threads, threads
    return 1, threads


def _even(channels: int, threads: int) -> int:
    return 1 if channels < _ALONE_CHANNELS else threads


def _shared(weights: op.Weights, residual: op.Residual, threads: int) -> int:
    """Parts that read whole cache lines of the residual rows, several lines each."""
    lines = -(-weights.tiles // tiles_of_line(residual.bits))
    return min(lines, threads * min(_MANY, max(1, lines // (2 * threads))))


def _experts(of: op.Experts, threads: int) -> tuple[int, int]:
    """Parts of a product with experts. Those that add up are divided by tiles, and each needs its own."""
    sizes = of.sizes
    most = -(-sizes.tiles // tiles_of_line(sizes.residual_bits)) if of.kept else sizes.tiles
    most = most if of.sum.at else 1 << 16
    return min(most, PARTS_OF_WEIGHTS * threads if threads > 1 else 1), min(most, threads * _UNEVEN)


def _product(weights: op.Weights, threads: int) -> tuple[int, int]:
    size = weights.tiles * weights.blocks * 16 * 32 * weights.bits // 8
    if size < _ALONE_BYTES:
        return 1, threads
    parts = PARTS_OF_WEIGHTS * threads if size >= _LARGE_BYTES and threads > 1 else threads
    return min(weights.tiles, parts), min(weights.tiles, threads * _MANY)
