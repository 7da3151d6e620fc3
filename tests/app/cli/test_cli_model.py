from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Answer = Callable[..., dict[str, Any]]
SHORT = ("hi", "--raw", "--max-tokens", 1)


def test_a_stored_name(answer: Answer, stored: str, services: Any) -> None:
    assert answer("run", stored, *SHORT)["model"] == stored
    assert services.quantized == []


def test_a_folder_is_quantized_on_first_use_only(answer: Answer, services: Any, checkpoint: Path) -> None:
    for _ in range(2):
        assert answer("run", checkpoint, *SHORT)["model"] == "tiny-gptq-4bit"
    assert len(services.quantized) == 1
    assert [info.name for info in services.store().list()] == ["tiny-gptq-4bit"]


def test_a_folder_is_found_under_any_name(answer: Answer, services: Any, checkpoint: Path) -> None:
    answer("quantize", checkpoint, "--name", "mine")
    assert answer("run", checkpoint, *SHORT)["model"] == "mine"
    answer("quantize", checkpoint, "--bits", 3, "--name", "other")
    assert answer("run", checkpoint, *SHORT)["model"] == "mine"
    assert len(services.quantized) == 2


def test_touched_files_are_compared_again(
    answer: Answer, services: Any, checkpoint_maker: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint_maker(tmp_path / "mine")
    answer("run", folder, *SHORT)
    os.utime(folder / "model.safetensors")
    answer("run", folder, *SHORT)
    assert len(services.quantized) == 1


@pytest.mark.parametrize("memory", ["kept", "lost", "damaged"])
def test_another_folder_of_that_name_is_another_model(
    error: Callable[..., str],
    answer: Answer,
    services: Any,
    checkpoint_maker: Callable[..., Path],
    tmp_path: Path,
    memory: str,
) -> None:
    first, second = checkpoint_maker(tmp_path / "a" / "mine"), checkpoint_maker(tmp_path / "b" / "mine", seed=1)
    for _ in range(2):
        answer("run", first, *SHORT)
    if memory == "lost":
        services.origins_file().unlink()
    if memory == "damaged":
        services.origins_file().write_text("[")
    assert "mine-gptq-4bit" in error("run", second, *SHORT)
    answer("quantize", second, "--name", "second")
    assert answer("run", second, *SHORT)["model"] == "second"
    assert answer("run", first, *SHORT)["model"] == "mine-gptq-4bit"


def test_a_checkpoint_that_changed_is_not_taken_for_the_old_one(
    error: Callable[..., str], answer: Answer, checkpoint_maker: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint_maker(tmp_path / "mine")
    answer("run", folder, *SHORT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    assert "mine-gptq-4bit" in error("run", folder, *SHORT)


def test_a_checkpoint_of_the_same_size_is_not_taken_for_the_old_one(
    error: Callable[..., str], answer: Answer, checkpoint_maker: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint_maker(tmp_path / "mine")
    for _ in range(2):
        answer("run", folder, *SHORT)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "mine-gptq-4bit" in error("run", folder, *SHORT)


def test_a_hub_name_is_downloaded_and_quantized_once(answer: Answer, services: Any) -> None:
    for _ in range(2):
        assert answer("run", "some/tiny", *SHORT)["model"] == "some/tiny-gptq-4bit"
    assert services.pulled == [("some/tiny", None)]
    assert len(services.quantized) == 1


def test_progress_of_a_first_use_goes_to_standard_error(run: Callable[..., Any], checkpoint: Path) -> None:
    result = run("run", checkpoint, *SHORT, "--json")
    assert json.loads(result.stdout)["model"] == "tiny-gptq-4bit"
    assert "this is done once" in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smal", "did you mean small?"),
        ("entirely-different", "there are: demo, small"),
        ("./nowhere", "there is no folder ./nowhere"),
        ("/nowhere/at/all", "there is no folder /nowhere/at/all"),
        ("../../nowhere", "there is no folder ../../nowhere"),
        ("a/b/c", "owner/name"),
        ("", "owner/name"),
    ],
)
def test_what_names_nothing(error: Callable[..., str], stored: str, name: str, said: str) -> None:
    assert said in error("run", name, "hi")


def test_a_folder_without_a_checkpoint(error: Callable[..., str], tmp_path: Path) -> None:
    assert "no config.json" in error("run", tmp_path, "hi")


def test_a_checkpoint_is_needed_where_a_low_bit_model_is_named(
    error: Callable[..., str], stored: str, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.write_text("some text")
    for arguments in (("quantize", stored), ("eval", stored, "--text", file, "--full-precision")):
        line = error(*arguments)
        assert "hub name (tiny)" in line


def test_a_damaged_checkpoint(error: Callable[..., str], checkpoint_maker: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint_maker(tmp_path / "mine")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in error("run", folder, "hi")
