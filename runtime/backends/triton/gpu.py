"""Detection of the graphics card: its capabilities, why it cannot be used, and its bandwidth.

First looks without torch, whose import takes over a second: on a machine without a card nothing more is loaded. With a
card, a tiny kernel is launched once per process, which detects a missing compiler or an old driver before a model is
loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import cache

from runtime.backends import Device, Presence
from runtime.backends.triton.failures import CannotRunError, explained, least_driver
from runtime.errors import BackendError
from tuner.detect import MemoryInfo
from tuner.gpu import GpuInfo, detect_gpus

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability of the kernels (Ampere)."""
KEPT = 1024
"""Bytes of each of a card's threads that the driver keeps; see `kept_bytes`."""


def probe() -> Presence:
    """Detect cards and installed software. Free memory is measured now."""
    cards = [gpu for gpu in detect_gpus() if gpu.vendor == "nvidia"]
    if not cards:
        return Presence(usable=False, reason="no NVIDIA card was found")
    if cards[0].driver is None or cards[0].compute_capability is None:
        return Presence(
            usable=False,
            reason=f"no driver answers for {cards[0].name}",
            fix="install NVIDIA's driver, or make the card visible to this container",
            gpu=cards[0],
        )
    if all(_too_old(card) for card in cards):
        return _refused(cards[0])
    missing, fix = _missing(cards[0].driver)
    if missing is not None:
        return Presence(usable=False, reason=missing, fix=fix, gpu=cards[0])
    card = _matching(cards, _first_uuid())
    if _too_old(card):
        return _refused(card, "name another card in the variable CUDA_VISIBLE_DEVICES")
    try:
        launch_once()
    except CannotRunError as error:
        return Presence(usable=False, reason=error.reason, fix=error.fix, gpu=card)
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
        BackendError: it does not respond.
    """
    seen = probe()
    if not seen.usable or seen.gpu is None:
        raise BackendError(f"the graphics card no longer responds: {seen.reason}")
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


@cache
def launch_once() -> None:
    """Launch a tiny kernel, unless one was already launched; failures are retried the next time.

    Raises:
        CannotRunError: why not, and what to do.
    """
    try:
        from runtime.backends.triton.launch_check import launch

        counted = launch("cuda")
    except Exception as error:  # compilers, drivers and loaders raise errors of every kind
        raise explained(error) from error
    if not counted:
        raise CannotRunError("a tiny kernel gave a wrong result on the card", "update NVIDIA's driver")


def is_started() -> bool:
    """Whether this process has used the card, so that the driver's memory is already allocated."""
    return launch_once.cache_info().currsize > 0


def kept_bytes() -> int:
    """Device memory that the driver takes for a model's kernels once and keeps, of a card that has started.

    An H200 kept 240 MiB. It is taken to grow with the threads that a card can hold, as stacks do: 36 MiB on an RTX 4060
    Laptop GPU.
    """
    import torch

    try:
        found = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError):  # probing says why
        return 0
    return KEPT * found.multi_processor_count * found.max_threads_per_multi_processor


def _too_old(card: GpuInfo) -> bool:
    """Whether a card is older than the kernels support."""
    return tuple(int(part) for part in (card.compute_capability or "0").split(".")) < MIN_CAPABILITY


def _refused(card: GpuInfo, fix: str | None = None) -> Presence:
    least = ".".join(map(str, MIN_CAPABILITY))
    reason = f"{card.name} has compute capability {card.compute_capability}, and the kernels need {least}"
    return Presence(usable=False, reason=reason, fix=fix, gpu=card)


def _first_uuid() -> str | None:
    """The card that CUDA lists first, by its NVML id; None if unknown."""
    import torch

    try:
        return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    except (RuntimeError, AssertionError, AttributeError):
        return None


def _matching(cards: Sequence[GpuInfo], uuid: str | None) -> GpuInfo:
    """The card with that id: NVML orders cards by slot, CUDA by speed and CUDA_VISIBLE_DEVICES."""
    return next((card for card in cards if card.uuid is not None and card.uuid == uuid), cards[0])


def _memory(gpu: GpuInfo) -> MemoryInfo | None:
    """The card's memory according to CUDA, or else its driver; None if neither reports it."""
    if is_started():
        import torch

        try:
            available, total = torch.cuda.mem_get_info()
        except (RuntimeError, AssertionError) as error:
            logger.warning("the card does not say what is free: %s", error)
        else:
            return MemoryInfo(total_bytes=total, available_bytes=available, limit_bytes=None)
    if gpu.memory_total_bytes is None:
        return None
    free = gpu.memory_free_bytes if gpu.memory_free_bytes is not None else gpu.memory_total_bytes
    return MemoryInfo(total_bytes=gpu.memory_total_bytes, available_bytes=free, limit_bytes=None)


@cache
def link_gb_s() -> float | None:
    """Measured bandwidth from page-locked main memory to the card, in 10^9 bytes per second; once per process.

    None if no card can be used, or if the measurement fails: then only its data sheet tells.
    """
    if not probe().usable:
        return None
    from runtime.backends.triton.bandwidth import host_to_device_gb_s

    try:
        return host_to_device_gb_s()
    except RuntimeError as error:
        logger.warning("the link to the card could not be measured: %s", error)
        return None


def memory_gb_s() -> float | None:
    """See `runtime.backends.Backend.memory_gb_s`. None if no card can be used."""
    if not probe().usable:
        return None
    from runtime.backends.triton.bandwidth import device_read_gb_s

    try:
        return device_read_gb_s()
    except RuntimeError as error:
        raise BackendError(f"the speed of the card's memory could not be measured: {error}") from error


def _missing(driver: str) -> tuple[str | None, str | None]:
    """Requirements missing besides a driver of this version, and advice; (None, None) if nothing."""
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
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            return "the variable CUDA_VISIBLE_DEVICES hides every card", "unset CUDA_VISIBLE_DEVICES"
        return (
            f"torch, built for CUDA {built}, finds no device",
            f"update NVIDIA's driver: CUDA {built} needs {least_driver(built)}, and this is {driver}",
        )
    return None, None
