"""The CPU backend as `runtime.backend.Backend` describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.spec import ModelSpec
from runtime.backend import Device, Footprint, ModelSizes, Presence
from runtime.decoder import Decoder, DecoderOptions
from runtime.errors import BackendError
from runtime.kv.kinds import KINDS, KVKind
from runtime.problem import Problem
from runtime.weights import Weights

if TYPE_CHECKING:
    from runtime.backends.cpu.decoder import CpuDecoder
    from tuner.timer import Timer

_FEW_KERNELS = 2
"""Kernels that a cache has for itself: more that are missing are everybody's."""


class CpuBackend:
    """Integer kernels compiled for this processor."""

    name = "cpu"
    label = "the CPU backend"
    kinds = tuple(KINDS)
    untuned: Problem | None = None

    def probe(self) -> Presence:
        """See `runtime.backend.Backend.probe`."""
        try:
            from runtime.backends.cpu.machine.isa import VARIANT, supported_variants
        except (ImportError, OSError, BackendError) as error:
            return Presence(
                usable=False,
                reason=f"the CPU kernels can't be built ({error})",
                fix="correct what it says, or reinstall the program with its dependencies",
            )
        best = supported_variants()[0]
        forced = "" if best == VARIANT else f" (forced; {best} would run too)"
        return Presence(usable=True, reason=f"the CPU kernels use {VARIANT}{forced}", variant=VARIANT)

    def footprint(self, spec: ModelSpec, sizes: ModelSizes, *, compensated: bool) -> Footprint:
        """See `runtime.backend.Backend.footprint`. Residuals are mapped files, which the system may drop."""
        return Footprint(weight_bytes=sizes.weight_bytes, residual_bytes=sizes.residual_bytes if compensated else 0)

    def preparation(self, kv: KVKind) -> str | None:
        """See `runtime.backend.Backend.preparation`."""
        try:
            from runtime.backends.cpu.link import needed
        except (ImportError, OSError, BackendError):
            return None
        missing = sum(not unit.is_compiled for unit in needed(KINDS[kv]))
        if not missing:
            return None
        if missing > _FEW_KERNELS:
            return "compiling the kernels for this processor, once; this takes up to half a minute"
        return f"compiling the kernels that {kv} caches need besides, once; this takes some seconds"

    def open(self, model: Weights, options: DecoderOptions) -> Decoder:
        """See `runtime.backend.Backend.open`."""
        try:
            from runtime.backends.cpu.decoder import CpuDecoder
        except (ImportError, OSError) as error:
            raise BackendError(f"its kernels cannot be built here: {error}") from error
        return CpuDecoder(model, options)

    def device(self, options: DecoderOptions) -> Device:
        """See `runtime.backend.Backend.device`."""
        from runtime.backends.cpu.machine.isa import VARIANT
        from runtime.backends.cpu.pool import default_threads
        from tuner.detect import detect_cpu

        threads = options.threads or default_threads()
        capability = f"{VARIANT}, {threads} thread{'s' if threads > 1 else ''}"
        return Device(name=detect_cpu().name, capability=capability, driver=None)

    def timer(self, decoder: CpuDecoder, *, seconds: float) -> Timer:
        """See `runtime.backend.Backend.timer`."""
        from runtime.backends.cpu.timer import CpuTimer

        return CpuTimer(decoder, seconds=seconds)

    def problems(self, decoder: Decoder) -> tuple[Problem, ...]:
        """See `runtime.backend.Backend.problems`."""
        return ()

    def link_gb_s(self) -> float | None:
        """See `runtime.backend.Backend.link_gb_s`. Residuals are read where they lie."""
        return None


BACKEND = CpuBackend()
