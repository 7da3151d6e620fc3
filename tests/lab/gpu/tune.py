"""The tuner's result for a budget of 5 %, and the slowdown that decoding then has."""

from __future__ import annotations

from unittest import mock

import torch

from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton.decoder import TritonDecoder
from tests.lab.gpu.bandwidth import multiprocessors
from tests.lab.gpu.decode import Copied, Remembered, _budget, _timer
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import RandomModel

BUDGET = 5.0


def kept(row: Row) -> bool:
    """Whether the budget bought some channels, and decoding was measured to be within it."""
    return any(row["k_chunk"].values()) and row["measured_slowdown_percent"] <= BUDGET


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row: n_tb, k_chunk, predicted and measured slowdown, tokens a second."""
    options = DecoderOptions(context=min(2048, sizes.load_context), max_rows=16)
    with mock.patch("runtime.backends.triton.model.repack", Copied().repack):
        decoder = TritonDecoder(RandomModel(sizes.tuned, 4, head_residuals=False), options, device)
    timer = Remembered(_timer(decoder, 4, device))
    row: Row = {"what": "tuned", "budget_percent": BUDGET}
    row |= _budget(decoder, timer, BUDGET, sizes, multiprocessors(device))
    part.add(row | {"correct": kept(row) or device.type != "cuda"})
    decoder.close()
