"""The graphics card: whether the GPU backend can run on it, and if not, why not; what it is; how fast its link is.

Looks without torch first, whose import takes over a second: on a machine without a card nothing more is loaded.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

from runtime.backend import Device, Presence
from runtime.errors import BackendError
from tuner.detect import MemoryInfo
from tuner.gpu import GpuInfo, detect_gpus

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Compute capability that the kernels are compiled for at least (Ampere)."""


def look() -> Presence:
    """Look at the cards and at what is installed. Free memory is as it is now."""
    cards = [gpu for gpu in detect_gpus() if gpu.vendor == "nvidia"]
    if not cards:
        return Presence(usable=False, reason="no NVIDIA card was found")
    card = cards[0]
    if card.driver is None or card.compute_capability is None:
        return Presence(
            usable=False,
            reason=f"no driver answers for {card.name}",
            fix="install NVIDIA's driver, or make the card visible to this container",
            gpu=card,
        )
    capability = tuple(int(part) for part in card.compute_capability.split("."))
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return Presence(
            usable=False,
            reason=f"{card.name} has compute capability {card.compute_capability}, and the kernels need {least}",
            gpu=card,
        )
    missing, fix = _missing()
    if missing is not None:
        return Presence(usable=False, reason=missing, fix=fix, gpu=card)
    return Presence(
        usable=True,
        reason=f"{card.name} was found, and Triton's kernels run on it",
        variant=f"compute capability {card.compute_capability}",
        memory=_memory(card),
        gpu=card,
    )


def device() -> Device:
    """The card that the GPU backend computes on.

    Raises:
        BackendError: it does not answer.
    """
    seen = look()
    if not seen.usable or seen.gpu is None:
        raise BackendError(f"the graphics card does not answer any more: {seen.reason}")
    import torch

    gpu = seen.gpu
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


def _memory(gpu: GpuInfo) -> MemoryInfo | None:
    """The card's memory; None where its driver does not say."""
    if gpu.memory_total_bytes is None:
        return None
    free = gpu.memory_free_bytes if gpu.memory_free_bytes is not None else gpu.memory_total_bytes
    return MemoryInfo(total_bytes=gpu.memory_total_bytes, available_bytes=free, limit_bytes=None)


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
