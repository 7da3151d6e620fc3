"""Whether the GPU backend can run here, and if not, why not: what `auto` goes by and what `doctor` says.

Looks without torch first, whose import takes over a second: on a machine without a card nothing more is loaded.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache

from tuner.detect import GpuInfo, MemoryInfo
from tuner.gpu import detect_gpus

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Compute capability that the kernels are compiled for at least (Ampere)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """What came of the look."""

    usable: bool
    """Whether the GPU backend can run."""
    reason: str
    """Why, in half a sentence."""
    fix: str | None = None
    """What a person can do about it; None where there is nothing to be done, or no need."""
    gpu: GpuInfo | None = None
    """The card."""

    @property
    def because(self) -> str:
        """Why the GPU backend is chosen, in one sentence; where it can run."""
        return f"{self.reason}, and Triton's kernels run on it"

    @property
    def memory(self) -> MemoryInfo | None:
        """The card's memory; None where there is no usable card or its driver does not say."""
        if not self.usable or self.gpu is None or self.gpu.memory_total_bytes is None:
            return None
        free = self.gpu.memory_free_bytes if self.gpu.memory_free_bytes is not None else self.gpu.memory_total_bytes
        return MemoryInfo(total_bytes=self.gpu.memory_total_bytes, available_bytes=free, limit_bytes=None)


def look() -> GpuChoice:
    """Look at the cards and at what is installed. Free memory is as it is now."""
    cards = [gpu for gpu in detect_gpus() if gpu.vendor == "nvidia"]
    if not cards:
        return GpuChoice(usable=False, reason="no NVIDIA card was found")
    card = cards[0]
    if card.driver is None or card.compute_capability is None:
        return GpuChoice(
            usable=False,
            reason=f"no driver answers for {card.name}",
            fix="install NVIDIA's driver, or make the card visible to this container",
            gpu=card,
        )
    capability = tuple(int(part) for part in card.compute_capability.split("."))
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return GpuChoice(
            usable=False,
            reason=f"{card.name} has compute capability {card.compute_capability}, and the kernels need {least}",
            gpu=card,
        )
    missing, fix = _missing()
    return GpuChoice(usable=missing is None, reason=missing or f"{card.name} was found", fix=fix, gpu=card)


@cache
def link_gb_s() -> float | None:
    """Measured bandwidth from page-locked main memory to the card, in 10^9 bytes per second; once in a process.

    None where no card can be used, or where it refuses: what it can do is then known from its data sheet only.
    """
    if not look().usable:
        return None
    from runtime.backends.triton.link import host_to_device_gb_s

    try:
        return host_to_device_gb_s()
    except RuntimeError as error:
        logger.warning("the link to the card could not be measured: %s", error)
        return None


@cache
def _missing() -> tuple[str | None, str | None]:
    """What the installation lacks, and what to do; (None, None) if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "install triton, which there is for Linux"
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        if built is None:
            return (
                "torch was built without CUDA",
                "install a CUDA build of torch (see pytorch.org) into the environment",
            )
        return f"torch, built for CUDA {built}, finds no device", "update NVIDIA's driver"
    return None, None
