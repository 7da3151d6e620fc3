"""The tuner's result for a budget of 5 %, and the slowdown that decoding then has."""

from __future__ import annotations

from unittest import mock

import torch

from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton.decoder import TritonDecoder
from tests.bench.first_light.sizes import Amount
from tests.bench.gpu.bandwidth import multiprocessors
from tests.bench.gpu.decode import Copied, Remembered, _budget, _timer
from tests.bench.gpu.matrices import RandomModel
from tests.bench.gpu.report import Part, Row

BUDGET = 5.0


def kept(row: Row) -> bool:
    """Whether the budget bought some channels, and decoding was measured to be within it."""
    return any(row["k_chunk"].values()) and row["measured_slowdown_percent"] <= BUDGET


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row: n_tb, k_chunk, predicted and measured slowdown, tokens a second."""
    options = DecoderOptions(context=min(2048, amount.context), max_rows=16)
    with mock.patch("runtime.backends.triton.model.repack", Copied().repack):
        decoder = TritonDecoder(RandomModel.of(amount.tuned, 4), options, device)
    timer = Remembered(_timer(decoder, 4, device))
    row: Row = {"what": "tuned", "budget_percent": BUDGET}
    row |= _budget(decoder, timer, BUDGET, amount.bench, multiprocessors(device))
    part.add(row | {"correct": kept(row) or device.type != "cuda"})
    decoder.close()
