"""CPU timer: times one layer type with and without compensation. Implements `tuner.timer.Timer`.

A pass runs the products of one layer type in all blocks, with their selections, on the pool's threads: the machine code
of a decode step without everything else. Blocks have different weights, so those of a large model are read from memory,
as in a step. Passes with and without compensation alternate, and the fastest tenth of each counts, as in
`runtime.measure.timing`. The time without is measured once, so that all results of a timer are comparable.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import Step
from runtime.measure.timing import undisturbed

_LEAST, _MOST = 5, 151
"""Passes per measurement. Callers take the median of several."""
_PASS_S = 5e-4
"""A pass is repeated until it takes about this many seconds, so that its start-up cost is negligible."""


class CpuTimer:
    """Times the layer types of a loaded model. Overwrites slot 0 of its cache.

    Args:
        decoder: The loaded model.
        seconds: Time limit of one measurement; at least five passes are made.
    """

    measured = True

    def __init__(self, decoder: CpuDecoder, *, seconds: float = 0.25) -> None:
        self._decoder = decoder
        self._seconds = seconds
        self._plain: dict[str, tuple[npt.NDArray[np.int64], int, float]] = {}
        """By layer type: the product's program, its repetitions in a pass, its seconds."""
        self._compensated: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
        """Programs with compensation by layer type and k_chunk: recording one takes as long as a reading."""
        stream = np.random.RandomState(0).standard_normal((1, decoder.spec.hidden_size)).astype(np.float32)
        decoder.forward(Step.of([0], stream=None if decoder.spec.embeds else stream))  # finite numbers in every buffer

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:  # noqa: ARG002  for GPUs, which have thread blocks
        """Seconds of one product of a layer type.

        Args:
            kind: Layer type.
            n_tb: Ignored.
            k_chunk: Salient channels per 1024; 0 for the product alone.
        """
        if kind not in self._plain:
            program = self._decoder.layer_program(kind, 0)
            with self._decoder.session():
                self._decoder.run_layers(program)
                repeats = max(1, int(_PASS_S / min(self._pass(program, 3) for _ in range(5))))
            seconds = undisturbed(self._passes(repeats, program)[0]) / self._decoder.spec.products(kind)
            self._plain[kind] = program, repeats, seconds
        plain, repeats, base = self._plain[kind]
        if k_chunk == 0:
            return base
        if (kind, k_chunk) not in self._compensated:
            self._compensated[kind, k_chunk] = self._decoder.layer_program(kind, k_chunk)
        without, compensated = self._passes(repeats, plain, self._compensated[kind, k_chunk])
        return base * undisturbed(compensated) / undisturbed(without)

    def _passes(self, repeats: int, *programs: npt.NDArray[np.int64]) -> list[list[float]]:
        """Seconds of the passes of each program; the programs alternate."""
        times: list[list[float]] = [[] for _ in programs]
        with self._decoder.session():
            self._decoder.run_layers(programs[-1])
            end = time.perf_counter() + self._seconds
            while len(times[0]) < _LEAST or (time.perf_counter() < end and len(times[0]) < _MOST):
                for program, own in zip(programs, times, strict=True):
                    own.append(self._pass(program, repeats))
        return times

    def _pass(self, program: npt.NDArray[np.int64], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            self._decoder.run_layers(program)
        return (time.perf_counter() - began) / repeats
