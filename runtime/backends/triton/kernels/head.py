"""The end of a step on the GPU: the compensation of the head joins the logits, and a broken number raises a flag.

The flag lies on the device and is read after the step, with the logits or the token drawn from them, so that nothing
waits inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead

BLOCK = 1024
"""Logits of one program: 8 for each of its 128 threads."""


@triton.jit(do_not_specialize=["size"])
def _finish_kernel(logits_ptr, dec_ptr, flag_ptr, size, BLOCK: tl.constexpr):
    """Program b handles block b of the logits. logits, dec [size], flag [1]; whoever sets it writes the same 1."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    logits = tl.load(logits_ptr + offs, mask=mask, other=0.0)
    if dec_ptr is not None:
        logits += tl.load(dec_ptr + offs, mask=mask, other=0.0)
        tl.store(logits_ptr + offs, logits, mask=mask)
    finite = tl.abs(logits) < float("inf")  # false for a NaN as well
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        tl.store(flag_ptr, 1)


def finish(logits: torch.Tensor, dec: torch.Tensor | None, flag: torch.Tensor) -> None:
    """Add the head's compensation to its logits, and set the flag where one of them is a NaN or infinity.

    Args:
        logits: float32 [R, V], contiguous; updated in place.
        dec: float32 [R, V], compensation of the head, or None.
        flag: int32 [1]; set to 1 at a NaN or infinity, else left as it is. The caller clears it.
    """
    size = logits.numel()
    _finish_kernel[(triton.cdiv(size, BLOCK),)](logits, dec, flag, size, BLOCK=BLOCK, num_warps=4)


def ahead() -> tuple[Ahead, ...]:
    """The specialization with compensation."""
    from runtime.backends.triton.ahead import Ahead

    return (
        Ahead(
            name="finish",
            kernel=_finish_kernel,
            signature={
                "logits_ptr": "*fp32",
                "dec_ptr": "*fp32",
                "flag_ptr": "*i32",
                "size": "i32",
                "BLOCK": "constexpr",
            },
            constants={"BLOCK": BLOCK},
        ),
    )
