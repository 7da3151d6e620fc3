"""Files that ship with the program: the bundled model, calibration and evaluation texts.

The functions only name or read files; nothing is touched when the module is imported.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "calibration_file",
    "calibration_text",
    "demo_checkpoint_path",
    "demo_path",
    "evaluation_file",
    "evaluation_text",
]

_ROOT = Path(__file__).parent


def demo_path() -> Path:
    """Read-only folder of the bundled model `demo` in the store's layout, at 4 bits."""
    return _ROOT / "demo" / "packed"


def demo_checkpoint_path() -> Path:
    """Hugging Face checkpoint folder of the bundled model, in bfloat16, from which `demo_path` was made."""
    return _ROOT / "demo" / "checkpoint"


def calibration_text() -> str:
    """Text that quantizers run through a model for its activations: prose, dialogue, code, mathematics, languages."""
    return calibration_file().read_text(encoding="utf-8")


def evaluation_text() -> str:
    """Text on which a model is measured after quantizing; shares nothing with the calibration text."""
    return evaluation_file().read_text(encoding="utf-8")


def calibration_file() -> Path:
    """Where `calibration_text` lies."""
    return _ROOT / "text" / "calibration.md"


def evaluation_file() -> Path:
    """Where `evaluation_text` lies."""
    return _ROOT / "text" / "evaluation.md"
