"""Errors of `models`.

ModelError
 ├─ UnsupportedModelError     the architecture, or an option of it, is not one this program runs
 ├─ CheckpointError           a checkpoint is incomplete, damaged or in a foreign format
 ├─ QuantizationError         the recipe cannot be applied to this model
 ├─ StoreError                a stored model is missing or damaged, or its name is invalid
 │   └─ ModelNotFoundError    no stored model of that name
 ├─ HubError                  the hub refuses, or sent something unexpected
 │   └─ HubUnreachableError   the hub does not respond: no network, or it is down
 ├─ PackageIndexError         a package index can't be reached, or sent something unexpected
 └─ CancelledError            the work was asked to stop
"""

from __future__ import annotations

from importlib.util import find_spec

_MAX_LENGTH = 2000
"""Maximum length of a message in characters, because a damaged file may contain gigabyte-long names and values."""


class ModelError(Exception):
    """Base of all errors of this package. The message says what happened, where, and what to do."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _MAX_LENGTH:
            message = f"{message[: _MAX_LENGTH * 3 // 4]} … {message[-_MAX_LENGTH // 4 :]}"
        super().__init__(message)


class UnsupportedModelError(ModelError):
    """The architecture, or an option of it, is not one this program runs."""


class CheckpointError(ModelError):
    """A checkpoint is incomplete, damaged or in a foreign format."""


class QuantizationError(ModelError):
    """The recipe cannot be applied to this model."""


class StoreError(ModelError):
    """A stored model is missing or damaged, its name is invalid, or a disk operation failed."""


class ModelNotFoundError(StoreError):
    """No stored model of that name."""


class HubError(ModelError):
    """The hub refuses, lacks the requested file, or sent something unexpected."""


class HubUnreachableError(HubError):
    """The hub does not respond: there is no network, a proxy interferes, or the hub is down."""


class PackageIndexError(ModelError):
    """A package index can't be reached, lacks the requested file, or sent something unexpected."""


class CancelledError(ModelError):
    """The work was asked to stop; its progress is kept, and the same call continues it."""


MAKING = "making a low-bit model"
"""The work of `models.quantize`."""
LEFT_OUT = ("torch", "transformers", "triton", "triton-windows")
"""Packages without which stored models run on a processor: see requirements-cpu.txt."""


def check_needed(work: str, *packages: str) -> None:
    """Check that packages of `LEFT_OUT` are installed, without importing them.

    Args:
        work: What needs them, as a sentence begins: `making a low-bit model`.
        packages: Which of them; all that making models needs if none is given.

    Raises:
        ModelError: one is not installed.
    """
    missing = [name for name in packages or ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{work} needs {' and '.join(missing)}, which this installation leaves out: install the whole program, or "
            "do this on a machine that has it"
        )
