"""Uniform group quantization: what every asymmetric base method produces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

SMALLEST_SCALE = 2.0**-24
"""The smallest positive fp16 number: the scale of a group that is all zeros, so that nothing divides by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCodes:
    """Ŵ[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g] with g = k // group_size; the last group may be shorter."""

    codes: torch.Tensor
    """uint8 [N, K], each below 2^bits."""
    scales: torch.Tensor
    """float16 [N, G], positive."""
    zeros: torch.Tensor
    """uint8 [N, G], integer zero-points below 2^bits."""
    group_size: int
    """Input channels that share a scale."""

    def dequantize(self) -> torch.Tensor:
        """Ŵ as float32 [N, K]."""
        weight = self.codes.to(torch.float32)
        for columns, groups in group_slices(weight.shape[1], self.group_size):
            part = split_groups(weight[:, columns], groups)
            part -= self.zeros[:, groups, None].to(torch.float32)
            part *= self.scales[:, groups, None].to(torch.float32)
        return weight


def group_slices(width: int, group_size: int) -> Iterator[tuple[slice, slice]]:
    """Cut K channels into a part of whole groups and the shorter last group.

    Yields:
        (channels, groups) of each part; the groups of a part are all equally long.
    """
    whole = width // group_size
    if whole:
        yield slice(0, whole * group_size), slice(0, whole)
    if width % group_size:
        yield slice(whole * group_size, width), slice(whole, whole + 1)


def split_groups(part: torch.Tensor, groups: slice) -> torch.Tensor:
    """View the channels of a part, [N, groups * g], as [N, groups, g]."""
    count = groups.stop - groups.start
    return part.view(part.shape[0], count, part.shape[1] // count)
