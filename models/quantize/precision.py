"""Matrix products in bfloat16 on processors with instructions for them: about three times as fast, summed in float32.

That is precise enough for input statistics and for the perplexities that `quantize` shows: it moves SmolLM2's from
20.09 to 20.10. Weights and the results of `eval` are computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_products() -> Iterator[None]:
    """Allow torch to multiply float32 matrices in bfloat16 within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
