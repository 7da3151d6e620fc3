"""Scoring, packing and drawing, on a toy model and on hand-made answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assets.demo_model.curve import draw
from assets.demo_model.pack import pack
from assets.demo_model.questions import questions
from assets.demo_model.score import FullPrecision, main, score
from assets.demo_model.train import Plan, Trainer
from models.recipe import Recipe
from models.store import StoredModel
from tests.lab import demo_table
from tests.lab.demo_table import LowBit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a toy run with a checkpoint."""
    folder = tmp_path_factory.mktemp("toy") / "run"
    plan = Plan(
        hidden=128,
        intermediate=128,
        layers=1,
        heads=2,
        kv_heads=1,
        vocabulary=512,
        context=1024,
        tokens=1024,
        part=1024,
        steps=2,
        tokenizer_texts=200,
    )
    Trainer(plan, folder).run(until=2, save_every=10)
    return folder


def test_pack_makes_a_model_of_the_store_that_can_be_packed_again(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "demo" / "packed"
    info = pack(run / "checkpoint", target)
    assert info.name == "demo"
    assert info.recipe == Recipe(method="rtn", bits=4, group_size=128)
    first = {path.name: path.read_bytes() for path in target.iterdir()}
    pack(run / "checkpoint", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == first
    assert [path.name for path in target.parent.iterdir()] == ["packed"], "no scratch folder stays"
    StoredModel.open_folder(target, "demo").verify()
    assert pack(run / "checkpoint", target, bits=3).recipe.bits == 3


def test_answers_of_checkpoint_and_stored_model(run: Path, tmp_path: Path) -> None:
    pack(run / "checkpoint", tmp_path / "packed")
    asked = questions(1, kinds=("talk", "story"))
    full = FullPrecision(run / "checkpoint")
    assert set(score(full, asked)[0]) == {"talk", "story"}
    assert full.held_out_loss(2048) > 1
    with LowBit(tmp_path / "packed", 64, backend="reference") as low:
        right, wrong = score(low, asked)
    assert len(wrong) == sum(not answer for answers in right.values() for answer in answers)


def test_command_line_of_the_score(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--checkpoint", str(run / "checkpoint"), "--count", "1", "--kind", "talk", "--wrong"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["right"]["talk"].endswith(" / 1")
    assert printed["perplexity"] > 1


def test_table_of_every_form(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(LowBit):
        def __init__(self, folder: Path, k_chunk: int) -> None:
            super().__init__(folder, k_chunk, backend="reference")

        def answer(self, messages: object) -> str:
            return "I don't know that. I am a very small model."

    monkeypatch.setattr(demo_table, "LowBit", Silent)
    monkeypatch.setattr(demo_table, "questions", lambda count: questions(count, kinds=("talk", "invented")))
    monkeypatch.setattr(demo_table, "KINDS", ("talk", "invented"))
    demo_table.main(["--checkpoint", str(run / "checkpoint"), "--count", "1", "--out", str(tmp_path / "wrong.json")])
    rows = capsys.readouterr().out.splitlines()
    assert (
        rows[0]
        == "| kind | full precision | 4 bits, k_chunk 0 | 4 bits, k_chunk 64 | 3 bits, k_chunk 0 | 3 bits, k_chunk 64 |"
    )
    assert rows[3].endswith("| 1 / 1 | 1 / 1 | 1 / 1 | 1 / 1 |")
    assert len(json.loads((tmp_path / "wrong.json").read_text())) == 5


def test_curve_shows_both_losses() -> None:
    picture = draw([{"tokens": 0, "loss": 6.0}, {"tokens": 50, "loss": 0.5}, {"tokens": 50, "held_out_loss": 0.7}])
    assert picture.count("<polyline") == 2 + 3
    assert "held out" in picture
    with pytest.raises(ValueError, match="no losses"):
        draw([{"tokens": 1}])
