"""GPU timer: times one layer type with its compensation. Implements `tuner.timer.Timer`.

All layers of the type run one after another in a captured graph, each concurrently with its compensation as in a decode
step, timed by events around the replay. Layers have different weights: those of a real model pass through the L2 cache
without staying. If all of them fit in it, the graph clears it in between, and the time of a graph without layers is
subtracted.

Source: QDEC §4.4.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from runtime.backends.operations.channels import layer_kind
from runtime.backends.triton.buffers import Value
from runtime.backends.triton.decoder import CAPTURE_MODE, TritonDecoder
from runtime.backends.triton.model import Linear
from runtime.backends.triton.products import Mixture, compensated_product, product
from tuner.errors import TimerError

_REPLAYS = 20
WARM_S = 0.3
"""Seconds of work before timing a rested card: its clocks rise, or fall to a sustainable frequency."""
_RESTED_S = 0.2
"""Seconds without work after which a card counts as rested."""
_L2_FACTOR = 2
"""Weights of this many times the L2 cache do not stay in it between replays."""

Replay = Callable[[], float]
"""Replays a graph, waits for it, and returns its seconds."""


def in_turns(replays: Sequence[Replay], rounds: int) -> list[list[float]]:
    """Seconds of each, in interleaved rounds, so that a changing clock frequency affects all alike."""
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for own, replay in zip(times, replays, strict=True):
            own.append(replay())
    return times


class Pace:
    """Prevents timing a card right after a rest.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._latest: float | None = None

    def warm(self, replay: Replay) -> None:
        """Keep a rested card busy for a while."""
        began = self._now()
        if self._latest is None or began - self._latest > _RESTED_S:
            while self._now() - began < WARM_S:
                replay()

    def worked(self) -> None:
        self._latest = self._now()


class CudaTimer:
    """Times the layer types of a loaded model. Overwrites the decoder's activations, but not its cache.

    A product with compensation is timed alternating with the product alone; the result is the ratio of the two times
    the separately measured time of the product alone.

    Args:
        decoder: The loaded model, on a GPU. Its k_chunk and n_tb are restored afterwards.
    """

    measured = True

    def __init__(self, decoder: TritonDecoder) -> None:
        self._decoder = decoder
        self._device = decoder.model.device
        properties = torch.cuda.get_device_properties(self._device)
        self._l2_bytes = int(properties.L2_cache_size)
        self._flush = torch.zeros(_L2_FACTOR * self._l2_bytes, dtype=torch.uint8, device=self._device)
        self._pace = Pace()
        self._plain: dict[str, Replay] = {}
        self._emptied: dict[int, Replay] = {}
        self._readings: dict[str, list[float]] = {}
        mixture = decoder.spec.mixture
        read = 1 if mixture is None else mixture.experts_per_token
        self._chosen = torch.arange(read, dtype=torch.int32, device=self._device)[None]
        layers = decoder.model.linears.values()
        widest = max(linear.packed.shape[1] * (read if linear.experts else 1) for linear in layers)
        decoder.buffers.input(1, widest).normal_()

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Seconds of one product of a layer type, with the compensation of so many blocks; k_chunk 0: alone.

        Raises:
            TimerError: the device does not respond, or has too little memory.
        """
        before = self._decoder.options
        try:
            if kind not in self._plain:
                self._decoder.set_k_chunk(0)
                self._plain[kind] = self._captured(self._layers(kind), flush=self._small(kind))
            if not k_chunk:
                return self._alone(kind)
            if kind not in self._readings:
                self._alone(kind)
            self._decoder.set_k_chunk({kind: k_chunk}, {kind: n_tb})
            return self._beside(kind)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise TimerError(
                f"{kind} could not be timed with {n_tb} blocks and k_chunk {k_chunk}: {str(error).splitlines()[0]}"
            ) from error
        finally:
            self._decoder.set_k_chunk(before.k_chunk, before.n_tb)

    def _alone(self, kind: str) -> float:
        """The product alone, alternating with clearing of the cache."""
        (plain,) = self._medians(kind, [self._plain[kind]])
        self._readings.setdefault(kind, []).append(plain)
        return plain

    def _beside(self, kind: str) -> float:
        """The product with the current compensation."""
        both = self._captured(self._layers(kind), flush=self._small(kind))
        plain, compensated = self._medians(kind, [self._plain[kind], both])
        return compensated / plain * statistics.median(self._readings[kind])

    def _medians(self, kind: str, replays: Sequence[Replay]) -> list[float]:
        """Median seconds of a product for each graph, without the clearing of the cache."""
        count, products = len(self._layers(kind)), self._decoder.spec.products(kind)
        empty = [self._clearing(count)] if self._small(kind) else []
        self._pace.warm(self._plain[kind])
        times = [statistics.median(each) for each in in_turns([*replays, *empty], _REPLAYS)]
        self._pace.worked()
        cleared = times.pop() if empty else 0.0
        return [max(seconds - cleared, 1e-9) / products for seconds in times]

    def _layers(self, kind: str) -> list[Linear]:
        return [linear for name, linear in self._decoder.model.linears.items() if layer_kind(name) == kind]

    def _small(self, kind: str) -> bool:
        """Whether a type's layers would stay in the cache between replays."""
        mixture = self._decoder.spec.mixture
        share = 1.0 if mixture is None else mixture.experts_per_token / mixture.num_experts
        sizes = (linear.weight.nbytes * (share if linear.experts else 1) for linear in self._layers(kind))
        return sum(sizes) < _L2_FACTOR * self._l2_bytes

    def _clearing(self, count: int) -> Replay:
        """Seconds for clearing the cache a number of times."""
        if count not in self._emptied:
            self._emptied[count] = self._capture(lambda: [self._flush.zero_() for _ in range(count)])
        return self._emptied[count]

    def _captured(self, layers: list[Linear], *, flush: bool) -> Replay:
        self._run(layers, flush=flush)  # compiles new kernels
        return self._capture(lambda: self._run(layers, flush=flush))

    def _capture(self, launches: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
            launches()
        return partial(_replayed, graph)

    def _run(self, layers: list[Linear], *, flush: bool) -> None:
        for linear in layers:
            if flush:
                self._flush.zero_()
            launch(self._decoder, linear, self._chosen)


def launch(decoder: TritonDecoder, linear: Linear, chosen: torch.Tensor) -> Value:
    """The product of one token with a layer, and its compensation; `chosen` are its experts, int32 [1, read]."""
    buffers, (N, K) = decoder.buffers, linear.packed.shape
    if linear.experts:
        positions, read = buffers.positions[:1], chosen.shape[1]
        run = Mixture(decoder.model, buffers, side=decoder.side, way="rows", positions=positions, watch=None)
        if layer_kind(linear.packed.name) == "gate_up":
            x, out = Value(buffers.input(1, K), left=buffers.left(1, K)), buffers.output(read, N)
            return run.product(linear, x, chosen, out)
        x, out = Value(buffers.input(read, K), left=buffers.left(1, K, each=read)), buffers.output(1, N)
        assert buffers.routing is not None
        return run.product(linear, x, chosen, out, shares=buffers.routing.routed(1).shares)
    x, out = Value(buffers.input(1, K), left=buffers.left(1, K)), buffers.output(1, N)
    if linear.selection is None:
        product(linear, x, out, buffers)
        return Value(out)
    dec = buffers.compensation(1, N)
    compensated_product(linear, x, buffers.positions[:1], out, dec, buffers, decoder.side)
    return Value(out, dec)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
