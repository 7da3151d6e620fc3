"""Packages that only some work needs, and the one sentence where they were left out."""

from __future__ import annotations

from importlib.util import find_spec

from models.errors import ModelError

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
