"""Detection of the graphics card: its capabilities, why it cannot be used, and its bandwidth.

First looks without torch, whose import takes over a second: on a machine without a card nothing more is loaded. With a
card, a tiny kernel is launched once per process, which detects a missing compiler or an old driver before a model is
loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from runtime.backends import Device, Presence
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
    """The card that the GPU backend computes on; raises BackendError if it does not respond."""
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

    Raises CannotRunError: why not, and what to do.
    """
    try:
        from runtime.backends.triton.card import launch

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
    from runtime.backends.triton.card import host_to_device_gb_s

    try:
        return host_to_device_gb_s()
    except RuntimeError as error:
        logger.warning("the link to the card could not be measured: %s", error)
        return None


def memory_gb_s() -> float | None:
    """None if no card can be used."""
    if not probe().usable:
        return None
    from runtime.backends.triton.card import device_read_gb_s

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


_OTHERWISE = "look whether `nvidia-smi` sees the card, restart the program, or use the CPU backend"
MIN_DRIVER = {13: 580, 12: 525}
"""The oldest driver on Linux for each major version of CUDA.

Source: NVIDIA, CUDA Toolkit Release Notes (CUDA 13), and CUDA Compatibility, minor version compatibility.
"""
_DRIVER_WORDS = ("driver version is insufficient", "driver on your system is too old", "unsupported toolchain",
                 "system not yet initialized", "unsupported ptx version")  # fmt: skip
_NO_IMAGE_WORDS = ("no kernel image", "device kernel image is invalid")
_TEXT_LENGTH = 300


class CannotRunError(BackendError):
    """The graphics card cannot run kernels.

    Args:
        reason: Why, as a phrase.
        fix: Advice.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}: {fix}")
        self.reason, self.fix = reason, fix


def least_driver(cuda: str) -> str:
    """Minimum driver of a CUDA version such as `13.0`, as `580 or newer`; `a newer one` if unknown."""
    major = cuda.partition(".")[0]
    known = MIN_DRIVER.get(int(major)) if major.isdigit() else None
    return "a newer one" if known is None else f"{known} or newer"


def explained(error: BaseException) -> CannotRunError:
    """Explain an error raised by a launch or its preparation."""
    for about in (_of_the_compiler, _of_the_system, _of_the_kernel, _of_the_driver):
        found = about(error)
        if found is not None:
            return CannotRunError(*found)
    return CannotRunError(f"the card runs no kernel ({first_line(error)})", _OTHERWISE)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines: Sequence[str] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_TEXT_LENGTH]}" if lines else type(error).__name__


def _of_the_compiler(error: BaseException) -> tuple[str, str] | None:
    """Errors of the C compiler that builds Triton's launcher, and of ptxas."""
    if "C compiler" in str(error):
        return (
            "Triton finds no C compiler, which it builds its launcher with",
            "install one (Debian and Ubuntu: `apt install gcc`), or name it in the variable CC",
        )
    if isinstance(error, FileNotFoundError) and error.filename is not None and "/" not in str(error.filename):
        return (
            f"the C compiler {error.filename}, which Triton builds its launcher with, does not exist",
            "correct the variable CC, or unset it and install gcc",
        )
    if not isinstance(error, subprocess.CalledProcessError):
        return None
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = ".".join(platform.python_version_tuple()[:2])
        return (
            f"Python's header {header} is missing, which Triton's launcher is built with",
            f"install it (Debian and Ubuntu: `apt install python{version}-dev`)",
        )
    command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
    return (
        f"the C compiler could not build Triton's launcher ({command[:_TEXT_LENGTH]})",
        "run that command to see why, or name another compiler in the variable CC",
    )


def _of_the_system(error: BaseException) -> tuple[str, str] | None:
    """Errors of the cache folder, and missing driver libraries."""
    text = str(error).lower()
    if "libcuda" in text:
        return "the driver's library libcuda.so.1 was not found", "install NVIDIA's driver, or run `ldconfig`"
    if isinstance(error, OSError | ImportError):
        return (
            f"Triton cannot use its folder of compiled kernels ({first_line(error)})",
            "name a folder in the variable TRITON_CACHE_DIR that can be written and whose files may be run",
        )
    return None


def _of_the_kernel(error: BaseException) -> tuple[str, str] | None:
    """Errors of a kernel: resources that the card lacks, or a card that is too new or too old."""
    text = str(error).lower()
    if {"required", "limit", "name"} <= vars(error).keys():  # triton.runtime.errors.OutOfResources
        name, required, limit = (vars(error)[key] for key in ("name", "required", "limit"))
        reason = f"a kernel needs more {name} than the card has ({required}, and there are {limit})"
        return reason, "use the CPU backend, and report this with the card's name"
    if "out of memory" in text:
        return "the card's memory is taken", "close other programs that use the GPU (`nvidia-smi` names them)"
    if any(words in text for words in _NO_IMAGE_WORDS):
        return (
            "this build of torch or Triton has no code for the card",
            "install a newer build of torch (see pytorch.org) into the environment",
        )
    if "ptxas" in text:
        return f"Triton's assembler failed ({first_line(error)})", "reinstall triton, or use the CPU backend"
    return None


def _of_the_driver(error: BaseException) -> tuple[str, str] | None:
    text = str(error).lower()
    if any(words in text for words in _DRIVER_WORDS):
        import torch

        wanted = least_driver(torch.version.cuda or "")
        return "NVIDIA's driver is too old for this build of torch or Triton", f"update it to {wanted}"
    if "active drivers" in text:
        return "Triton finds no driver", "install NVIDIA's driver, or make the card visible to this container"
    return None
