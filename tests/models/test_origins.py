"""Where the checkpoint of a stored model is found, and when it is not taken for it any more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from models import origins
from models.catalogue import KNOWN
from models.errors import CheckpointError
from models.origins import Origins
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModelInfo
from tests.models.conftest import TEXT, write_checkpoint
from tests.models.gguf.making import random_model, write_gguf

RECIPE = Recipe(bits=3, group_size=32)


def made(store: Store, checkpoint: Path) -> StoredModelInfo:
    return quantize(checkpoint, store, RECIPE, name="small", calibration=TEXT)


def test_a_model_knows_its_checkpoint_until_that_changes_or_goes(tmp_path: Path) -> None:
    store, folder = Store(tmp_path / "store"), write_checkpoint(tmp_path / "source")
    info, places = made(store, folder), Origins(store)
    assert places.source(info) == folder
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"is not the checkpoint .*quantize --force"):
        places.source(info)
    moved = folder.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"\(source\) is not where it was: .* `lowbit-chat run PATH"):
        places.source(info)
    (moved / "model.safetensors").write_bytes(sound)
    assert places.made_from(info, moved), "as where it is named once"
    assert Origins(store).source(info) == moved


def test_a_checkpoint_in_the_cache_of_the_hub_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--tiny"
    snapshot = write_checkpoint(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    store = Store(tmp_path / "store")
    info = made(store, snapshot)
    Origins(store).file.unlink()
    assert info.source == "some/tiny"
    assert Origins(store).source(info) == snapshot


@pytest.mark.parametrize("way", ["noted", "of the catalogue"])
def test_a_gguf_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    known = KNOWN["smollm2-135m"]
    file = write_gguf(tmp_path / known.file, random_model("Llama"), kind="Q8_0")
    store = Store(tmp_path / "store")
    info = made(store, file)
    if way != "noted":
        file = Path(shutil.move(file, store.root / file.name))
        monkeypatch.setattr(origins, "fetched", lambda model, own: {(known, store): file}[model, own])
    assert Origins(store).source(info) == file
