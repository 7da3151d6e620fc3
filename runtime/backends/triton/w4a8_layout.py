"""W4A8 weight layout on the GPU: two codes per byte, in blocks that form two operands of INT8 tensor cores.

K is padded with zeros to whole groups, or blocks without groups, and divided into blocks of 2 · H input channels; H is
64, or 32 where groups have 64 channels. The activations' codes are padded in the same way, so products need no masks.
Byte j of a block has channel j in its low and channel H + j in its high half, so that one AND makes an operand of H
neighbouring channels, and one shift the other. For one block, the [N, H] bytes of all output channels are contiguous. A
group's whole scale s and z · s, 240 at most, lie in one half-word.

Source: QServe §4.2.1 (compute-aware weight reorder), §4.2.2 (z · s).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from models.packed import PackedLinear
from runtime.backends.triton import on_card
from runtime.backends.triton.sizes import half_of, token_width, w4a8_bytes
from runtime.errors import BackendError

SMALLEST_GROUP = 64
"""Fewest input channels of a group: a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A8Linear:
    """A W4A8 matrix on the device."""

    name: str
    """For example `layers.3.qkv`."""
    shape: tuple[int, int]
    """(N, K)."""
    group_size: int
    """Input channels per integer scale: a power of two from 64 on; 0 = the whole row, without an integer scale."""
    codes: torch.Tensor
    """uint8 [width / 2H, N, H]; see the module."""
    scales: torch.Tensor
    """float16 [N]."""
    groups: torch.Tensor
    """int16 [G, N]: the low byte s, the high byte z · s."""
    bias: torch.Tensor | None
    """float32 [N] or None."""

    @property
    def half(self) -> int:
        """H."""
        return half_of(self.group_size)

    @property
    def width(self) -> int:
        """Input channels including padding."""
        return token_width(self.shape[1], self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.codes, self.scales, self.groups, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def repack_w4a8(packed: PackedLinear, device: torch.device | str) -> W4A8Linear:
    """Copy a stored W4A8 matrix to the device.

    Args:
        packed: A matrix with `per_token`.
        device: The destination.

    Raises:
        BackendError: unsupported group size.
    """
    (N, K), group_size = packed.shape, 0 if packed.group_scales is None else packed.group_size
    if group_size and (group_size < SMALLEST_GROUP or group_size & (group_size - 1)):
        raise BackendError(
            f"{packed.name}: groups of {group_size} channels; of qoq's, the GPU takes 64, 128 and so on, and none: "
            "quantize the model again with --group-size 128"
        )
    if w4a8_bytes((N, K), group_size) >= 1 << 31:
        raise BackendError(f"{packed.name}: {N} by {K} is more than the kernels can address")
    assert packed.zeros is not None
    half = half_of(group_size)
    blocks = token_width(K, group_size) // (2 * half)
    codes = torch.empty(blocks, N, half, dtype=torch.uint8, device=device)
    for start, stop, values in on_card.parts(packed.codes, packed.bits, device):
        row = values.flatten(1).to(torch.uint8)
        halves = torch.nn.functional.pad(row, (0, 2 * half * blocks - row.shape[1])).view(-1, blocks, 2, half)
        codes[:, start:stop] = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1)
    scales = np.ones_like(packed.zeros) if packed.group_scales is None else packed.group_scales
    groups = scales.astype(np.uint16) | (packed.zeros.astype(np.uint16) * scales) << 8
    return W4A8Linear(
        name=packed.name,
        shape=packed.shape,
        group_size=group_size,
        codes=codes,
        scales=torch.from_numpy(np.array(packed.scales[:, 0], np.float16)).to(device),
        groups=torch.from_numpy(np.ascontiguousarray(groups.T).view(np.int16)).to(device),
        bias=None if packed.bias is None else torch.from_numpy(np.array(packed.bias, np.float32)).to(device),
    )
