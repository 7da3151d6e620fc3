"""Real models of two widths of heads, with a text that they know."""

from __future__ import annotations

from pathlib import Path

import pytest

import assets
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel


def opened(name: str, data: Path, folders: pytest.TempPathFactory) -> tuple[StoredModel, str]:
    """A model at 4 bits, and some of its text.

    Args:
        name: `demo`, the bundled one, or that of a checkpoint in `data`.
        data: Models and texts.
        folders: Makes folders.
    """
    words = (data / "text/tinystories.txt").read_text()[:20_000]
    if name == "demo":
        return StoredModel.open_folder(assets.demo_path(), "demo"), words
    store = Store(folders.mktemp("store"))
    recipe = Recipe(bits=4, residual_bits=4, group_size=32)
    quantize(data / "models" / name, store, recipe, name="small", calibration=words)
    return store.open("small"), words
