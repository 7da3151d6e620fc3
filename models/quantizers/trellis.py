"""Trellis-coded quantization of rotated weights, with error feedback: the path of codes whose levels fit best.

Channels are taken in blocks from the last one to the first, since a state's older bits are the codes behind it. For
every output channel Viterbi's algorithm finds the path through a block and a few channels further, from the state that
the block before ended in; only the block's codes are kept. What they miss is handed on to the channels that follow, as
`models.quantizers.gptq` does it, whose feedback this takes in the rotated basis. A channel's error counts by 1 / U[j,
j]² there, what feedback leaves of it.

Sources: `models.trellis`; Tseng et al. 2024 (QTIP §3.2, block feedback after QuIP#'s).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models import trellis
from models.errors import QuantizationError
from models.quantizers import gptq
from models.quantizers.groups import LARGEST_SCALE, FloatArray, check_range, to_fp16_scale
from models.threads import each_chunk

SPREAD = {2: 2.55, 3: 2.9, 4: 3.3}
"""The largest level, in standard deviations of the weights, by bits: what has the least error on Gaussian weights, but
at 4 bits, where that is 3.15, a little more for the sake of SmolLM2's."""
UNEVEN = 1.5
"""How many times as large as all of a row's weights those of 64 channels may be before they decide its scale."""
DAMPING = 0.1
"""Added to the diagonal of the second moments, in units of its mean: better than 0.3 for SmolLM2."""
BLOCK = 8
"""Channels whose codes are found together: the fewer, the sooner errors are handed on, and the longer it takes."""
AHEAD = 16
"""Channels further that the search looks at."""
_TOGETHER = 64
"""Channels whose errors are handed on to all that follow in one matrix product."""
_SEARCH_WORK = 4096
"""What a row of a block counts for where rows are divided among threads, in weights of other loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisCodes:
    """See `models.trellis`."""

    codes: npt.NDArray[np.uint8]
    """uint8 [N, K filled up to a multiple of 32], each below 2^bits."""
    scales: npt.NDArray[np.float16]
    """float16 [N, 1], positive."""
    bits: int
    width: int
    """K."""

    def dequantize(self) -> FloatArray:
        """Ŵ as float32 [N, K], in the original basis."""
        return trellis.dequantize(trellis.pack(self.codes, self.bits), self.scales, self.bits, self.width)


def feedback(hessian: FloatArray) -> gptq.Feedback:
    """Prepare for a layer: `gptq.Feedback` in the rotated basis, with channels from the last to the first.

    Args:
        hessian: float32 [K, K], as for `gptq.feedback`.

    Raises:
        QuantizationError: as there.
    """
    turned = np.ascontiguousarray(trellis.rotate(trellis.rotate(hessian).T))
    return gptq.feedback(turned, np.arange(len(turned))[::-1], DAMPING)


def quantize(weight: FloatArray, bits: int, handed: gptq.Feedback) -> TrellisCodes:
    """Quantize a matrix.

    Args:
        weight: float32 [N, K].
        bits: Of a code: 2, 3 or 4.
        handed: From `feedback`.
    """
    import torch

    from models.quantizers.compiled import search_trellis

    check_range(weight, bits)
    rotated = trellis.rotate(weight)
    rows, width = rotated.shape
    scales = to_fp16_scale(_spreads(rotated) * (SPREAD[bits] / trellis.LARGEST_LEVEL))
    if float(scales.max(initial=0.0)) > LARGEST_SCALE:
        raise QuantizationError("weights are too large for fp16 scales")
    target = torch.from_numpy(rotated / scales[:, None]).T.flip(0).contiguous()  # [K, N], last channel first
    left, codes = target.numpy(), np.empty((width, rows), np.uint8)
    table, counts = trellis.levels(bits).astype(np.float32), handed.curvature[::-1] / handed.curvature.mean()
    errors, ends = np.empty((_TOGETHER, rows), np.float32), np.zeros(rows, np.uint8)
    for first in range(0, width, _TOGETHER):
        block, seen = slice(first, min(first + _TOGETHER, width)), slice(first, min(first + _TOGETHER + AHEAD, width))

        def work(part: slice, block: slice = block, seen: slice = seen) -> None:
            own = left[seen, part], handed.factor[block, seen], counts[seen], table, (BLOCK, AHEAD), ends[part]
            search_trellis[bits](*own, (codes[block, part], errors[: block.stop - block.start, part]))

        each_chunk(rows, _SEARCH_WORK, work)
        if seen.stop < width:
            handed_on = torch.from_numpy(handed.factor[block, seen.stop :]).mT
            target[seen.stop :].addmm_(handed_on, torch.from_numpy(errors), alpha=-1)
    return TrellisCodes(
        codes=np.ascontiguousarray(codes[::-1].T),
        scales=scales.astype(np.float16)[:, None],
        bits=bits,
        width=weight.shape[1],
    )


def _spreads(rotated: FloatArray) -> FloatArray:
    """What scales of rows [N, K] follow, float32 [N]: their root mean square, or a share of their largest channels'.

    A weight 27 times as large as its row's others, like those that make one token's massive activations, is 64 near the
    largest level in the rotated row, and was cut by a quarter.
    """
    squares = np.square(rotated)
    found = squares.mean(1)
    for first in range(0, rotated.shape[1], trellis.ROTATED):
        found = np.maximum(found, squares[:, first : first + trellis.ROTATED].mean(1) / UNEVEN**2)
    spread: FloatArray = np.sqrt(found)
    return spread
