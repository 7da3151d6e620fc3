"""Tokens a second of a whole model, decoded with the k_chunk and n_tb that the tuner finds for each budget.

The model has a Llama 3's shapes and random weights. Every budget is tuned for, held to its promise, and then timed in
turns with decoding that does not compensate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import torch

from models.packed import PackedLinear
from models.spec import ModelSpec
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.layout import GpuLinear, repack
from runtime.backends.triton.timer import CudaTimer
from runtime.measure.timing import DecodeTimer
from tests.lab.gpu.bandwidth import multiprocessors
from tests.lab.gpu.layers import copied
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import RandomModel
from tuner.devices import DEVICES
from tuner.search import Search
from tuner.shapes import LayerShape
from tuner.simulate import SimulatedTimer
from tuner.timer import Timer

_SHARED_BYTES = 48 << 10
SLOWDOWN_SECONDS = 0.7
"""One measurement of the slowdown, where a configuration is held to its budget."""


OF_A_TRELLIS = (0.0, 5.0)
"""Budgets for which it is timed, too."""


class Copied:
    """Repacks a matrix once, and copies it on the device for every layer of the same codes: loading is not measured."""

    def __init__(self) -> None:
        self._made: dict[int, GpuLinear] = {}

    def repack(self, packed: PackedLinear, device: torch.device) -> GpuLinear:
        """As `runtime.backends.triton.layout.repack`."""
        key = packed.codes.ctypes.data
        if key not in self._made:
            self._made[key] = repack(packed, device)
        return replace(copied(self._made[key]), name=packed.name)


class Remembered:
    """A timer that reads each point once and then repeats itself, so that budgets share what was measured.

    One reading of `CudaTimer` is already a median of many replays.
    """

    def __init__(self, timer: Timer) -> None:
        self.measured = timer.measured
        self._timer = timer
        self._readings: dict[tuple[str, int, int], float] = {}

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """As `tuner.timer.Timer`."""
        point = kind, n_tb, k_chunk
        if point not in self._readings:
            self._readings[point] = self._timer.seconds(kind, n_tb, k_chunk)
        return self._readings[point]


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """For each bit width a row for each budget; the row of budget 0 is the model without compensation.

    Of a trellis, which the program makes by default, first and with few budgets.
    """
    for trellis, bits in product((True, False), sizes.bits):
        began = time.monotonic()
        decoder = loaded(sizes, bits, device, trellis=trellis)
        seconds = round(time.monotonic() - began, 1)
        about = {"bits": bits, "codes": "trellis" if trellis else "uniform"}
        part.add({"what": "loaded"} | about | {"seconds": seconds, "weight_bytes": decoder.weight_bytes})
        timer = Remembered(_timer(decoder, bits, device))
        for budget in sizes.budgets:
            if trellis and budget not in OF_A_TRELLIS:
                continue
            if not part.begin(about | {"budget_percent": budget}):
                continue
            part.add(
                {"what": "decode"}
                | about
                | {"budget_percent": budget}
                | _budget(decoder, timer, budget, sizes, multiprocessors(device))
            )
        decoder.close()
        del decoder, timer


def loaded(sizes: Sizes, bits: int, device: torch.device, *, trellis: bool) -> TritonDecoder:
    """A decoder of the measured model with random weights."""
    options = DecoderOptions(context=sizes.context, max_rows=min(16, sizes.context))
    model = RandomModel(sizes.spec, bits, head_residuals=False, trellis=trellis)
    with mock.patch("runtime.backends.triton.model.repack", Copied().repack):
        return TritonDecoder(model, options, device)


def _budget(decoder: TritonDecoder, timer: Timer, budget: float, sizes: Sizes, sm_count: int) -> Row:
    """Tune for one budget, and time decoding with what was found."""
    row: Row = {}
    k_chunk: Mapping[str, int] = {}
    n_tb: Mapping[str, int] = {}
    if budget:
        began = time.monotonic()
        search = Search(layers(decoder.spec), timer, sm_count=sm_count, limit=_SHARED_BYTES)
        clock = DecodeTimer(decoder, seconds=SLOWDOWN_SECONDS)
        allowed = budget
        while True:  # as the ladder: less, until whole steps are within the budget
            found = search.within(allowed)
            k_chunk, n_tb = found.k_chunk, found.n_tb
            slowdown = statistics.median(clock.slowdown(k_chunk, n_tb) for _ in range(sizes.readings))
            if slowdown <= budget or allowed < budget / 8:
                break
            allowed *= min(0.9, max(0.5, budget / slowdown))
        row = {
            "n_tb_max": found.n_tb_max,
            "n_tb": dict(n_tb),
            "k_chunk": dict(k_chunk),
            "predicted_slowdown_percent": round(found.predicted_slowdown_percent, 2),
            "held_slowdown_percent": round(slowdown, 2),
            "tuning_seconds": round(time.monotonic() - began, 1),
        }
    without, with_it = [], []
    for _ in range(sizes.turns):
        decoder.set_k_chunk(0)
        without.append(seconds_per_token(decoder, sizes.tokens))
        decoder.set_k_chunk(k_chunk, n_tb)
        with_it.append(seconds_per_token(decoder, sizes.tokens))
    ratio = statistics.median(a / b for a, b in zip(with_it, without, strict=True))
    seconds = statistics.median(with_it)
    return row | {
        "measured_slowdown_percent": round(100 * (ratio - 1), 2),
        "tokens_per_second": round(1 / seconds, 1),
        "milliseconds_per_token": round(1e3 * seconds, 3),
        "weights_gb_s": round(decoder.weight_bytes / seconds / 1e9, 1),
    }


def layers(spec: ModelSpec) -> list[LayerShape]:
    """The layer types that are tuned: those of a block; the head keeps no residuals."""
    return [LayerShape(kind, *spec.linear_shape(kind), spec.num_layers) for kind in ("qkv", "o", "gate_up", "down")]


def _timer(decoder: TritonDecoder, bits: int, device: torch.device) -> Timer:
    """The device's own; a simulated device's where there is none."""
    if device.type == "cuda":
        return CudaTimer(decoder)
    return SimulatedTimer(DEVICES["rtx-4050m"], layers(decoder.spec), bits)


def seconds_per_token(decoder: TritonDecoder, tokens: int) -> float:
    """Median seconds of a decoded token, from the host's step to the logits in its memory."""
    row = np.zeros(1, np.int32)
    seconds = []
    with decoder.session():
        for position in range(1 + tokens):
            token = row + (7919 * position + 17) % decoder.spec.vocab_size
            began = time.perf_counter()
            decoder.forward(
                Step(tokens=token, slots=row, positions=row + position % decoder.options.context, logit_rows=row)
            )
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
