"""Repacking on the card: codes arrive in canonical packing and are put in the kernels' order there.

A card moves the bits of a model of 8 billion weights faster than they arrive; one thread of numpy takes 20 to 30
seconds for them. Everything is whole numbers, so the words are those that `runtime.backends.triton.layout` makes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from models.packing import RUN

_VALUES = 4 << 20
"""Codes unpacked at a time, 4 bytes each: with what is made of them, some 64 MB of the card."""


def parts(
    codes: npt.NDArray[np.int32], bits: int, device: torch.device | str
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Unpack rows of codes, some at a time.

    Args:
        codes: int32 [N, ceil(K / 32) * bits], canonical packing of 3 or 4 bits.
        bits: 3 or 4.
        device: Where.

    Yields:
        The first row, the one behind the last, and their codes, int32 [rows, ceil(K / 32), 32]; 0 from K on.
    """
    N, width = codes.shape
    pieces = width // bits
    rows = max(1, _VALUES // (pieces * RUN))
    for start in range(0, N, rows):
        words = torch.from_numpy(np.array(codes[start : start + rows])).to(device).view(-1, pieces, bits)
        yield start, start + len(words), _unpacked(words, bits)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Runs of words int32 [R, P, bits] -> codes int32 [R, P, 32]."""
    if bits == 4:
        return (words[..., None] >> _steps(8, 4, words) & 15).flatten(2)
    low = (words[..., :2, None] >> _steps(16, 2, words) & 3).flatten(2)
    return low | (words[..., 2:] >> _steps(32, 1, words) & 1) << 2


def _steps(count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return step * torch.arange(count, dtype=torch.int32, device=like.device)
