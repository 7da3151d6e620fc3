"""The real model of the tests: downloaded once, by one process, and never incomplete."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest

from tests import real_models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setattr(real_models, "TOOLS", tools)
    monkeypatch.setenv("LOWBIT_CHAT_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _tool(script: str) -> None:
    (real_models.TOOLS / "smollm2").write_text(script)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_many_ask_and_one_fetches(cache: Path) -> None:
    _tool(f'echo asked >> {cache}/asked; sleep 0.2; echo weights > "$1/{real_models.GGUF_NAME}"')
    asking = [get_context("fork").Process(target=real_models.gguf_file) for _ in range(4)]
    for process in asking:
        process.start()
    for process in asking:
        process.join()
    assert [process.exitcode for process in asking] == [0] * 4
    assert real_models.gguf_file().read_text() == "weights\n"
    assert (cache / "asked").read_text() == "asked\n"
    assert _names(cache) == {real_models.GGUF_NAME, "asked"}


def test_a_failure_says_why_leaves_nothing_and_is_not_repeated_at_once(cache: Path) -> None:
    _tool(f'echo asked >> {cache}/asked; echo half > "$1/{real_models.GGUF_NAME}"; echo no network >&2; exit 1')
    for _ in range(2):
        with pytest.raises(real_models.UnavailableError, match="no network"):
            real_models.gguf_file()
    assert (cache / "asked").read_text() == "asked\n"
    assert _names(cache) == {f"{real_models.GGUF_NAME}.refused", "asked"}


def test_without_the_tool_the_cache_will_do(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_models, "TOOLS", tmp_path / "nowhere")
    with pytest.raises(real_models.UnavailableError, match="shared/tools"):
        real_models.gguf_file()
    assert not cache.exists()
    cache.mkdir()
    (cache / real_models.GGUF_NAME).write_text("weights")
    assert real_models.gguf_file() == cache / real_models.GGUF_NAME
    made = real_models.kept("made", lambda folder: (folder / "made").touch())
    assert made.is_file(), "what takes no tools can be made"
