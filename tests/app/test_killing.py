"""The real program, killed at a few moments; `python -m tests.lab.killing` does it a hundred times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.conversation import Message
from app.history.store import History
from tests.lab.killing import MODELS, Found, kill_at_random


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_nothing_is_lost_and_nothing_stays(tmp_path: Path) -> None:
    found = kill_at_random(tmp_path, rounds=3, seed=11)
    assert found["broken"] == []
    assert found["messages"]["assistant, done"] >= 1


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    history = History(path)
    question = Message(id="q", parent=None, role="user", text="round 1: hello")
    answer = Message(id="a", parent="q", role="assistant", text="hi", model=MODELS[0])
    history.record("chat", "a", [question, answer])
    history.close()
    found = Found()
    found.look(tmp_path, "round 1", MODELS[0], due=True)
    assert found.broken == []
    found.kept = {"gone": ("done", "user", "x"), "q": ("done", "user", "another text")}
    found.look(tmp_path, "round 1", MODELS[1], due=True)
    found.look(tmp_path, "round 2", MODELS[1], due=True)
    lost, changed, named, unasked = found.broken
    assert "was lost" in lost
    assert "became" in changed
    assert named == "round 1: asked twin, answered under the name of demo"
    assert unasked == "round 2: the question was lost"
