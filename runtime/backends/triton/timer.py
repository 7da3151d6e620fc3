"""`CudaTimer`: what one layer type costs on this GPU, with compensation beside it. A `tuner.timer.Timer`.

All layers of the type run one after another in a captured graph, each beside its compensation as in a decode step, and
events around the replay give the time. Layers differ in their weights: those of a real model pass through the L2 cache
without staying. Where all of them fit it, the graph clears it in between, and the time without layers is taken off.

Source: QDEC §4.4.
"""

from __future__ import annotations

import statistics

import torch

from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.forward import Value, compensated_product, product
from runtime.backends.triton.model import Linear
from runtime.operations.channels import layer_kind
from tuner.errors import TimerError

_WARM, _REPLAYS = 3, 20
_L2_FACTOR = 2
"""Weights of so many times the L2 cache do not stay in it from one replay to the next."""


class CudaTimer:
    """Times the layer types of a loaded model; the decoder's activations are overwritten, its cache is not.

    Args:
        decoder: The loaded model, on a GPU. Its k_chunk and n_tb are changed and put back.
    """

    measured = True

    def __init__(self, decoder: TritonDecoder) -> None:
        self._decoder = decoder
        self._device = decoder.model.device
        properties = torch.cuda.get_device_properties(self._device)
        self._l2_bytes = int(properties.L2_cache_size)
        self._flush = torch.zeros(_L2_FACTOR * self._l2_bytes, dtype=torch.uint8, device=self._device)
        decoder.buffers.input(1, max(linear.packed.shape[1] for linear in decoder.model.linears.values())).normal_()

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Seconds of one product of a layer type.

        Args:
            kind: Layer type.
            n_tb: Thread blocks of the compensation.
            k_chunk: Salient channels per 1024; 0 for the product alone.

        Raises:
            TimerError: the device does not answer, or its memory does not suffice.
        """
        before = self._decoder.options
        try:
            self._decoder.set_k_chunk({kind: k_chunk}, {kind: n_tb} if k_chunk else None)
            layers = [linear for name, linear in self._decoder.model.linears.items() if layer_kind(name) == kind]
            return self._time(layers)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise TimerError(
                f"{kind} could not be timed with {n_tb} blocks and k_chunk {k_chunk}: {str(error).splitlines()[0]}"
            ) from error
        finally:
            self._decoder.set_k_chunk(before.k_chunk, before.n_tb)

    def _time(self, layers: list[Linear]) -> float:
        small = sum(linear.weight.nbytes for linear in layers) < _L2_FACTOR * self._l2_bytes
        self._run(layers, flush=small)  # compiles what is new
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(layers, flush=small)
        seconds = _replayed(graph)
        if small:
            empty = torch.cuda.CUDAGraph()
            with torch.cuda.graph(empty):
                for _ in layers:
                    self._flush.zero_()
            seconds = max(seconds - _replayed(empty), 1e-9)
        return seconds / len(layers)

    def _run(self, layers: list[Linear], *, flush: bool) -> None:
        buffers = self._decoder.buffers
        for linear in layers:
            if flush:
                self._flush.zero_()
            N, K = linear.packed.shape
            kind = layer_kind(linear.packed.name)
            x, out = Value(buffers.input(1, K), sums=buffers.sums(1, K)), buffers.output(kind, 1, N)
            if linear.selection is None:
                product(linear, x, out, buffers)
            else:
                dec = buffers.compensation(kind, 1, N)
                compensated_product(linear, x, buffers.positions[:1], out, dec, buffers, self._decoder.side)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Median seconds of a replay."""
    times: list[float] = []
    for turn in range(_WARM + _REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= _WARM:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
