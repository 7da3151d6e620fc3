"""The settings: precedence, one clear error for a bad value, and a file that is never half-written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app import paths, settings
from app.settings import RULES, SAMPLING_DEFAULTS, Settings, SettingsError
from runtime.compensation import Compensation


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in RULES:
        monkeypatch.delenv(f"LOWBIT_CHAT_{key.upper()}", raising=False)


def write(text: str) -> Path:
    file = paths.settings_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_without_a_file() -> None:
    assert settings.load() == Settings()
    assert not paths.settings_file().exists()


def test_flag_beats_environment_beats_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write('temperature = 0.1\ntop_k = 11\nkv = "int8"\n')
    monkeypatch.setenv("LOWBIT_CHAT_TEMPERATURE", "0.2")
    monkeypatch.setenv("LOWBIT_CHAT_TOP_K", "12")
    loaded = settings.load({"temperature": 0.3, "top_k": None})
    assert (loaded.temperature, loaded.top_k, loaded.kv) == (0.3, 12, "int8")


def test_sampling_is_the_persons_then_the_makers_then_the_programs() -> None:
    write("top_p = 0.5\n")
    recommended = {"temperature": 0.2, "top_p": 0.9, "max_length": 20}
    found = {"temperature": 0.2, "top_p": 0.5, "top_k": 40, "min_p": 0.0, "repetition_penalty": 1.05}
    assert settings.load().sampling(recommended) == found
    assert settings.load().sampling(None) == {**SAMPLING_DEFAULTS, "top_p": 0.5}


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    write("top_p = 0.5\n")
    monkeypatch.setenv("LOWBIT_CHAT_TOP_P", "")
    assert settings.load().top_p == 0.5


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ('kv = "int5"', "fp16, int8, int4, hierarchical, kcvt4, kivi2, gear4, gear2, gear-l4, gear-l2, or auto"),
        ('temperature = "warm"', "a number from 0 to 2, or auto"),
        ("temperature = nan", "a number from 0 to 2, or auto"),
        ("top_p = 0", "a number above 0 to 1, or auto"),
        ("top_k = 1.5", "a whole number from 0, or auto"),
        ("top_k = true", "a whole number from 0, or auto"),
        ("k_chunk = 1025", "a whole number from 0 to 1024, or auto"),
        ("budget = 101", "a number from 0 to 100, or exact, or auto"),
        ('budget = "best"', "a number from 0 to 100, or exact, or auto"),
        ("context = inf", "a whole number from 1, or auto"),
        ("system_prompt = 3", "text"),
        ("model = []", "text, or auto"),
    ],
    ids=lambda value: value.split(" ")[0] if "=" in value else "",
)
def test_a_bad_value_names_key_file_and_what_is_allowed(line: str, allowed: str) -> None:
    file = write(f"min_p = 0.1\n{line}\n")
    with pytest.raises(SettingsError) as raised:
        settings.load()
    message = str(raised.value)
    assert line.split(" ")[0] in message
    assert str(file) in message
    assert message.endswith(allowed)
    assert "\n" not in message


def test_a_bad_variable_and_a_bad_flag_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="--top-p"):
        settings.load({"top_p": 7})
    monkeypatch.setenv("LOWBIT_CHAT_CONTEXT", "many")
    with pytest.raises(SettingsError, match="LOWBIT_CHAT_CONTEXT"):
        settings.load()


def test_an_unknown_key_is_an_error_with_a_hint() -> None:
    file = write("temprature = 1\n")
    with pytest.raises(SettingsError, match="did you mean temperature") as raised:
        settings.load()
    assert str(file) in str(raised.value)
    with pytest.raises(SettingsError, match="known: model, kv"):
        settings.check("zzz", 1)


def test_broken_toml_and_an_unreadable_file_are_one_error() -> None:
    file = write("kv = \n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        settings.load()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot read"):
        settings.load()
    file.unlink()
    file.mkdir()
    with pytest.raises(SettingsError, match="cannot read"):
        settings.load()


def test_save_keeps_comments_and_takes_none_out() -> None:
    file = write("# mine\ncontext = 512 # enough\nkv = 'int8'\n")
    settings.save({"context": "1024", "kv": "fp16", "system_prompt": 'say "so" · 日本\nplease', "k_chunk": None})
    text = file.read_text(encoding="utf-8")
    assert "# mine" in text
    assert "# enough" in text
    loaded = settings.load()
    assert (loaded.context, loaded.kv, loaded.system_prompt) == (1024, "fp16", 'say "so" · 日本\nplease')
    settings.save({"context": "auto"})
    assert "context" not in file.read_text(encoding="utf-8")
    assert settings.load().context is None


def test_save_refuses_a_bad_value_and_leaves_the_file_alone() -> None:
    file = write("top_k = 3\n")
    for changes in ({"top_k": 5, "kv": "int5"}, {"top_k": 5, "nothing": 1}):
        with pytest.raises(SettingsError):
            settings.save(changes)
    assert file.read_text() == "top_k = 3\n"


def test_save_refuses_to_replace_a_file_it_cannot_parse() -> None:
    file = write("= =")
    with pytest.raises(SettingsError, match="not valid TOML"):
        settings.save({"top_k": 5})
    assert file.read_text() == "= ="


def test_a_failed_write_leaves_the_old_file_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("top_k = 3\n")

    def refuse(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SettingsError, match="cannot write the settings file"):
        settings.save({"top_k": 5})
    assert file.read_text() == "top_k = 3\n"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_saved_file_and_its_folder_are_private(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "settings.toml"
    settings.save({"theme": "light"}, file=file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.parent.parent.stat().st_mode) == 0o700


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.toml"
    target.write_text("top_k = 1\n")
    link = tmp_path / "settings.toml"
    link.symlink_to(target)
    settings.save({"top_k": 2}, file=link)
    assert link.is_symlink()
    assert target.read_text() == "top_k = 2\n"


def test_get_and_changed_check_their_keys() -> None:
    base = Settings()
    assert base.get("top_k") == base.top_k
    assert base.changed({"top_k": "7", "context": "auto"}).top_k == 7
    with pytest.raises(SettingsError):
        base.get("topk")
    with pytest.raises(SettingsError):
        base.changed({"top_k": -1})
    with pytest.raises(SettingsError):
        Settings(top_p=3.0)


def test_every_setting_says_what_it_means_and_accepts_its_default() -> None:
    for key, rule in RULES.items():
        assert rule.meaning
        assert rule.parse(Settings().get(key)) == Settings().get(key)


def test_home_variable_moves_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CHAT_HOME", str(tmp_path / "x"))
    places = [paths.home(), paths.store_root(), paths.cache_dir(), paths.settings_file(), paths.log_file()]
    assert all(place.is_relative_to(tmp_path / "x") for place in places)
    assert len(set(places)) == len(places)
    assert not (tmp_path / "x").exists()
    monkeypatch.delenv("LOWBIT_CHAT_HOME")
    assert not any(place.is_relative_to(tmp_path) for place in (paths.home(), paths.cache_dir(), paths.settings_file()))


def test_forced_drafts_take_a_cache_of_their_own_unless_one_is_named() -> None:
    plain, forced = Settings(kv="int8"), Settings(kv="int8", speculate="on")
    assert (plain.cache(), plain.cache("fp16")) == ("int8", "fp16")
    assert (forced.cache(), forced.cache("hierarchical")) == (None, "hierarchical")


def test_what_a_load_is_asked_for_beats_the_compensation_of_the_settings() -> None:
    settings = Settings(k_chunk=7, budget=20, prompt_budget=9)
    assert settings.compensation() == Compensation(k_chunk=7, prompt_budget_percent=9)
    asked = settings.compensation(Compensation(budget_percent=3), 4)
    assert asked == Compensation(budget_percent=3, prompt_budget_percent=4)


def test_exact_answers_are_the_last_budget_and_wanted_where_they_are_possible() -> None:
    settings.save({"budget": "exact", "prompt_budget": 9})
    found = settings.load()
    exact = Compensation(exact=True, or_usual=True)
    assert found.compensation() == found.compensation(None, 0.0) == exact, "which have no prompts to compensate"
    assert found.load_request("m").compensation == exact
    assert found.changed({"k_chunk": 3}).compensation() == Compensation(k_chunk=3, prompt_budget_percent=9)
    assert found.compensation(Compensation(budget_percent=3)).budget == 3
