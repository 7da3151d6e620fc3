from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Answer = Callable[..., dict[str, Any]]


def test_export(answer: Answer, stored: str, tmp_path: Path) -> None:
    made = answer("export", stored, "--format", "awq", "--output", str(tmp_path / "out"))
    assert {key: made[key] for key in ("name", "format", "path")} == {
        "name": stored,
        "format": "awq",
        "path": str(tmp_path / "out"),
    }
    assert set(made["weights"]) == {"INT4", "F16"}
    assert made["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())


def test_export_for_a_person(
    run: Callable[..., Any], stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("export", stored, "--format", "compressed-tensors", "--residuals")
    assert done.stdout.startswith(f"{stored}-compressed-tensors: ")
    assert "rounded to 4 bits anew" in done.stderr


def test_what_cannot_be_exported(error: Callable[..., str], stored: str, tmp_path: Path) -> None:
    assert "there is no stored model 'nothing'" in error("export", "nothing", "--format", "gguf")
    # The tiny model's tokenizer has no place in a GGUF file.
    assert "cannot be exported as gguf" in error(
        "export", stored, "--format", "gguf", "--output", str(tmp_path / "out.gguf")
    )
    assert list(tmp_path.iterdir()) == []
