"""Files of other programs, in folders laid out as theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.elsewhere import by_name, found
from models.errors import CheckpointError

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one model of each program, and what is no model."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("models.hub.cache.cache_root", lambda _: tmp_path / "hub")
    _file(tmp_path / ".ollama/models/blobs" / f"sha256-{DIGEST}")
    _manifest(tmp_path, "registry.ollama.ai/library/llama3.2/3b", DIGEST)
    _manifest(tmp_path, "hf.co/owner/name-GGUF/Q8_0", DIGEST)
    _manifest(tmp_path, "registry.ollama.ai/library/gone/latest", "cd" * 32)
    _manifest(tmp_path, "registry.ollama.ai/library/outside/latest", "../../../../secret")
    manifests = tmp_path / ".ollama/models/manifests/registry.ollama.ai/library"
    for name, text in {"broken": "{", "list": "[]", "empty": '{"layers": [{}]}', "deep": "[" * 100_000}.items():
        (manifests / name).mkdir()
        (manifests / name / "latest").write_text(text)
    studio = tmp_path / ".lmstudio/models/owner/name"
    for name in ("name-Q4_K_M.gguf", "mmproj-name.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        _file(studio / name)
    (studio / "no-model.gguf").write_text("html")
    _file(tmp_path / ".cache/llama.cpp/tiny.gguf")
    _file(tmp_path / "hub/models--owner--name-GGUF/snapshots/0123/name-Q8_0.gguf")
    return tmp_path


def _file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + bytes(60))


def _manifest(home: Path, name: str, digest: str) -> None:
    path = home / ".ollama/models/manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, kinds = "application/vnd.ollama.image.", {"template": "00" * 32, "model": digest}
    layers = [{"mediaType": kind + part, "digest": f"sha256:{own}"} for part, own in kinds.items()]
    path.write_text(json.dumps({"layers": layers}))


def test_models_of_other_programs_are_found_by_their_own_names(home: Path) -> None:
    assert [one.name for one in found()] == [
        "hub:owner/name-GGUF/name-Q8_0.gguf",
        "llama.cpp:tiny.gguf",
        "lmstudio:owner/name/big-00001-of-00002.gguf",
        "lmstudio:owner/name/name-Q4_K_M.gguf",
        "ollama:hf.co/owner/name-GGUF:Q8_0",
        "ollama:llama3.2:3b",
    ]
    assert {one.size for one in found()} == {64}
    assert all(one.path.is_relative_to(home) for one in found())


def test_a_file_with_a_name_is_taken_where_it_is_and_one_without_gets_a_link(home: Path) -> None:
    links = home / "links"
    plain = by_name("lmstudio:owner/name/name-Q4_K_M.gguf", links)
    assert plain == home / ".lmstudio/models/owner/name/name-Q4_K_M.gguf"
    assert not links.exists(), "nothing is made for it"
    for _ in range(2):
        link = by_name("ollama:llama3.2:3b", links)
        assert link == links / "llama3.2-3b.gguf"
        assert link.read_bytes() == b"GGUF" + bytes(60)
    link.unlink()
    link.symlink_to("/nowhere")
    assert by_name("ollama:llama3.2:3b", links) == link
    assert link.exists(), "a link that leads elsewhere is made anew"


def test_other_names_are_not_its_own_and_a_missing_file_says_what_there_is(home: Path) -> None:
    assert [by_name(name, home) for name in ("llama3.2:3b", "C:/models", "owner/name", "qwen:1b")] == [None] * 4
    with pytest.raises(CheckpointError, match=r"Ollama has no model 'gone:latest' here: .* --elsewhere"):
        by_name("ollama:gone:latest", home)


def test_a_folder_of_ones_own_is_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ollama").rename(home / "moved")
    assert not [one for one in found() if one.program == "ollama"]
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "moved/models"))
    assert [one.own_name for one in found() if one.program == "ollama"][-1] == "llama3.2:3b"
