"""Scoring, packing and drawing, on a toy model and on hand-made answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from assets.demo_model.curve import draw
from assets.demo_model.pack import pack
from assets.demo_model.score import Answerer, Question, questions
from assets.demo_model.train import Plan, Trainer
from models.recipe import Recipe
from models.store import StoredModel


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
        length=256,
        rows=4,
        steps=2,
        tokenizer_texts=200,
    )
    Trainer(plan, folder).run(until=2, save_every=10)
    return folder


def test_pack_makes_a_model_of_the_store_that_can_be_packed_again(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "demo" / "packed"
    info = pack(run / "checkpoint", target)
    assert info.name == "demo"
    assert info.recipe == Recipe(bits=4)
    first = {path.name: path.read_bytes() for path in target.iterdir()}
    pack(run / "checkpoint", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == first
    assert [path.name for path in target.parent.iterdir()] == ["packed"], "no scratch folder stays"
    StoredModel.open_folder(target, "demo").verify()
    assert pack(run / "checkpoint", target, bits=3).recipe.bits == 3


def test_answers_of_checkpoint_and_stored_model(run: Path, tmp_path: Path) -> None:
    pack(run / "checkpoint", tmp_path / "packed")
    full = Answerer.of_checkpoint(run / "checkpoint")
    low = Answerer.of_stored(tmp_path / "packed")
    assert isinstance(full.answer([{"role": "user", "content": "Hello"}]), str)
    before, after = full.held_out_loss(1), low.held_out_loss(1)
    assert before == pytest.approx(after, rel=0.02)
    assert before != after


def test_questions_are_of_every_kind_and_the_same_each_time() -> None:
    asked = questions(12)
    assert asked == questions(12)
    kinds = [question.kind for question in asked]
    assert {"talk", "program", "facts", "arithmetic", "numbers", "unknown", "follow_up", "name", "story"} == set(kinds)
    assert max(kinds.count(kind) for kind in set(kinds)) == 12
    assert all(question.messages[-1]["role"] == "user" for question in asked)


def test_what_counts_as_right() -> None:
    message = {"role": "user", "content": "?"}
    sum_question = Question(kind="arithmetic", messages=(message,), expected=("2 + 3 = 5",))
    assert sum_question.right("2 + 3 = 5")
    assert not sum_question.right("2 + 3 = 6")
    story = Question(kind="story", messages=(message,), expected=("owl", "an old castle"))
    told = "Once an owl lived in an old castle. It saw. It met. It gave. It learned."
    assert story.right(told)
    assert not story.right(told.replace("owl", "fox"))
    assert not story.right(told + " And it went")


def test_curve_shows_both_losses() -> None:
    picture = draw([{"tokens": 0, "loss": 6.0}, {"tokens": 50, "loss": 0.5}, {"tokens": 50, "held_out_loss": 0.7}])
    assert picture.count("<polyline") == 2 + 3
    assert "held out" in picture
    with pytest.raises(ValueError, match="no losses"):
        draw([{"tokens": 1}])
