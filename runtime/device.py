"""The device that a decoder computes on: what identifies it, and what the tuner has to know of it.

Source: QDEC §4.4 (a profile belongs to a model and a device).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.decoder import Decoder
from runtime.errors import BackendError

if TYPE_CHECKING:
    from tuner.detect import CpuInfo, GpuInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device; timings taken on it are good for another one that is equal."""

    name: str
    """As it calls itself."""
    capability: str
    """What it can do: `avx512, 8 threads`, or the compute capability `8.9`."""
    driver: str | None
    """Version of its driver; None for a processor."""
    sm_count: int | None = None
    """Multiprocessors; None for a processor."""
    shared_bytes: int | None = None
    """Shared memory of a thread block in bytes; None for a processor."""

    def __str__(self) -> str:
        """For a person."""
        return f"{self.name} ({self.capability})"


def device_of(decoder: Decoder) -> Device:
    """The device that a decoder computes on.

    Raises:
        BackendError: this backend is not one that tuning knows, or the device does not answer.
    """
    if decoder.backend == "cpu":
        from runtime.backends.cpu.decoder import CpuDecoder
        from tuner.detect import detect_cpu

        assert isinstance(decoder, CpuDecoder)
        return processor(detect_cpu(), decoder.variant, decoder.threads)
    if decoder.backend == "triton":
        from runtime.backends.triton.card import look

        seen = look()
        if not seen.usable or seen.gpu is None:
            raise BackendError(f"the graphics card does not answer any more: {seen.reason}")
        return card(seen.gpu)
    raise BackendError(f"the {decoder.backend} backend is for checking numbers, not for speed, and is not tuned")


def processor(cpu: CpuInfo, variant: str, threads: int) -> Device:
    """A processor as the CPU backend uses it."""
    return Device(name=cpu.name, capability=f"{variant}, {threads} thread{'s' if threads > 1 else ''}", driver=None)


def card(gpu: GpuInfo) -> Device:
    """A graphics card as the GPU backend uses it.

    Raises:
        BackendError: it does not answer.
    """
    import torch

    try:
        found = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"{gpu.name} does not answer ({error}); is it still there?") from error
    return Device(
        name=gpu.name,
        capability=gpu.compute_capability or f"{found.major}.{found.minor}",
        driver=gpu.driver,
        sm_count=found.multi_processor_count,
        shared_bytes=found.shared_memory_per_block,
    )
