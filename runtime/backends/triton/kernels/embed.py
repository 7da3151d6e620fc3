"""Rows of the embedding table on the GPU; the table may stay in page-locked memory of the CPU.

A row is read once for each token, so a table in page-locked memory costs a few kilobytes over PCIe and no GPU memory:
the kernel reads it where it lies, 16 bytes a thread, so that a warp asks for 512 consecutive bytes at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead

BLOCK_C = 1024
"""Channels of one program: 8 halves for each of its 128 threads."""


@triton.jit
def _embed_kernel(tokens_ptr, table_ptr, h_ptr, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Program (m, block) copies a block of channels of row m's token. tokens [M], table [V, C], h [M, C]."""
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    token = tl.load(tokens_ptr + row).to(tl.int64)
    values = tl.load(table_ptr + token * C + offs_c, mask=mask_c, other=0.0)
    tl.store(h_ptr + row * C + offs_c, values.to(tl.float32), mask=mask_c)


def embed(tokens: torch.Tensor, table: torch.Tensor, h: torch.Tensor) -> None:
    """Write the table's rows of the tokens to h.

    Args:
        tokens: int32 [M], token ids in [0, V): the kernel does not check them, so the caller does.
        table: float16 [V, C], on the device or in page-locked memory of the CPU (`Tensor.is_pinned`).
        h: float32 [M, C], contiguous; overwritten.
    """
    M, C = h.shape
    grid = (M, triton.cdiv(C, BLOCK_C))
    _embed_kernel[grid](tokens, table, h, C=C, BLOCK_C=BLOCK_C, num_warps=4)


def ahead() -> tuple[Ahead, ...]:
    """The specialization for 4096 channels."""
    from runtime.backends.triton.ahead import Ahead

    return (
        Ahead(
            name="embed C4096",
            kernel=_embed_kernel,
            signature={
                "tokens_ptr": "*i32",
                "table_ptr": "*fp16",
                "h_ptr": "*fp32",
                "C": "constexpr",
                "BLOCK_C": "constexpr",
            },
            constants={"C": 4096, "BLOCK_C": BLOCK_C},
        ),
    )
