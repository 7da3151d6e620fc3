"""System prompt presets: saved, edited by hand, and errors that name the place in the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import presets
from app.language import in_all_languages
from app.settings import SettingsError


def test_some_come_with_the_program(tmp_path: Path) -> None:
    found = presets.load(tmp_path / "presets.toml")
    assert found == dict(presets.BUNDLED)
    assert list(found) == sorted(found, key=str.casefold)
    assert not any(presets.name_problem(name) for name in found)


def test_unchanged_ones_are_in_the_language_of_today(tmp_path: Path) -> None:
    brief = presets.BUNDLED["Brief"]
    german = dict(zip(in_all_languages("Brief"), in_all_languages(brief), strict=True))
    short, text = list(german.items())[1]
    assert (short, text) != ("Brief", brief)
    file = tmp_path / "presets.toml"
    presets.save({short: text, "Coder": "Mine."}, file)
    assert presets.load(file) == {"Brief": brief, "Coder": "Mine."}
    presets.save({short: text, "Brief": "Mine."}, file)
    assert presets.load(file) == {short: text, "Brief": "Mine."}
    presets.save({short: f"{text}!"}, file)
    assert presets.load(file) == {short: f"{text}!"}


def test_what_is_kept_is_all_there_is(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "presets.toml"
    presets.save({'b.c "quoted"': "Be\na 海賊.", "A": "x"}, file)
    assert presets.load(file) == {"A": "x", 'b.c "quoted"': "Be\na 海賊."}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@given(
    kept=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=40),
        st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=60),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_every_text_comes_back(tmp_path: Path, kept: dict[str, str]) -> None:
    presets.save(kept, tmp_path / "presets.toml")
    assert presets.load(tmp_path / "presets.toml") == kept


@pytest.mark.parametrize(
    ("text", "told"), [("a = [", "not valid TOML"), ("a = 3", "'a', which is not text"), (b"\xff", "cannot read")]
)
def test_a_wrong_file_is_told_and_left(tmp_path: Path, text: str | bytes, told: str) -> None:
    file = tmp_path / "presets.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = file.read_bytes()
    with pytest.raises(SettingsError, match=told):
        presets.load(file)
    assert file.read_bytes() == before


def test_what_cannot_be_written_is_told_and_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "presets.toml"
    presets.save({"a": "b"}, file)

    def refuse(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SettingsError, match="cannot write the presets"):
        presets.save({}, file)
    assert presets.load(file) == {"a": "b"}
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_names() -> None:
    assert presets.name_problem(" ") == "A preset needs a name."
    assert presets.name_problem("a\nb") is not None
    assert presets.name_problem("x" * 41) is not None
    assert presets.name_problem("Seeräuber 海賊") is None
