"""Errors of Triton, the C compiler and the driver in plain words, with advice."""

from __future__ import annotations

import platform
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import BackendError

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
    """Minimum driver of a CUDA version, as `580 or newer`; `a newer one` if unknown.

    Args:
        cuda: `13.0`.
    """
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
