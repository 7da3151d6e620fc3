"""Entry point of the CPU backend. Implements `runtime.backends.Backend`."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from models.packed import Weights
from models.progress import Progress, ProgressCallback, ignore_progress
from models.spec import ModelSpec
from runtime.backends import Device, Footprint, ModelSizes, Presence
from runtime.backends.decoder import MTP_KV, Decoder, DecoderOptions
from runtime.compensation import CHUNK
from runtime.errors import BackendError, Problem
from runtime.kv.kinds import KINDS, KVKind

if TYPE_CHECKING:
    from runtime.backends.cpu.decoder import CpuDecoder
    from tuner.timer import Timer


class CpuBackend:
    """Integer kernels, compiled for this processor."""

    name = "cpu"
    label = "the CPU backend"
    kinds = tuple(KINDS)
    untuned: Problem | None = None
    step_rows = (256,)
    prompt_levels = (CHUNK, 256, 128, 64)

    def probe(self) -> Presence:
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
        """See `runtime.backends.Backend.footprint`.

        Residuals are copied out of the mapped file: as rows, and additionally as tiles if all are read at every step.
        The source's own weights count as 16-bit numbers.
        """
        residuals = sizes.residual_bytes * (1 + sizes.whole) if compensated else 0
        exact = 2 * sum(math.prod(spec.linear_shape(name)) for name in spec.linear_names()) if sizes.exact else 0
        return Footprint(
            weight_bytes=sizes.weight_bytes + sizes.mtp_bytes + exact,
            residual_bytes=residuals,
            residuals_beside=True,
            mtp=sizes.mtp,
        )

    def prepare(
        self, model: Weights, kv: KVKind, *, compensated: bool, ahead: bool = False, progress: ProgressCallback
    ) -> None:
        try:
            from runtime.backends.cpu.link import paging_units, prompt_units, units_of
            from runtime.backends.cpu.machine.build import build
        except (ImportError, OSError, BackendError):
            return

        def report(done: int, total: int) -> None:
            message = f"compiling {_counted(total)} for this processor, once"
            progress(Progress(phase="compile", done=done, total=total, unit="kernels", message=message))

        with contextlib.suppress(BackendError):
            later = [*prompt_units(model), *paging_units(KINDS[kv])] if ahead else []
            if model.mtp is not None:
                later += units_of(model.mtp, KINDS[MTP_KV], compensated=False)
            build([*units_of(model, KINDS[kv], compensated=compensated), *later], report)

    def open(self, model: Weights, options: DecoderOptions, progress: ProgressCallback = ignore_progress) -> Decoder:
        try:
            from runtime.backends.cpu.decoder import CpuDecoder
        except (ImportError, OSError) as error:
            raise BackendError(f"its kernels cannot be built here: {error}") from error
        return CpuDecoder(model, options)

    def device(self, options: DecoderOptions) -> Device:
        from runtime.backends.cpu.machine.isa import VARIANT
        from runtime.backends.cpu.pool import default_threads
        from tuner.detect import detect_cpu

        threads = options.threads or default_threads()
        capability = f"{VARIANT}, {threads} thread{'s' if threads > 1 else ''}"
        return Device(name=detect_cpu().name, capability=capability, driver=None)

    def timer(self, decoder: CpuDecoder, *, seconds: float) -> Timer:
        from runtime.backends.cpu.timer import CpuTimer

        return CpuTimer(decoder, seconds=seconds)

    def problems(self, decoder: Decoder) -> tuple[Problem, ...]:
        return ()

    def link_gb_s(self) -> float | None:
        """See `runtime.backends.Backend.link_gb_s`. Residuals are in main memory already."""
        return None

    def memory_gb_s(self) -> float | None:
        return None


def _counted(kernels: int) -> str:
    return f"{kernels} kernel{'s' if kernels > 1 else ''}"


BACKEND = CpuBackend()
