from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.origins import Origins
from tests.app.cli.conftest import write_checkpoint
from tests.models.gguf.making import random_model, write_gguf

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
Error = Callable[..., str]
SHORT = ("hi", "--raw", "--max-tokens", 1)


def test_a_stored_name(answer: Answer, stored: str, services: Any) -> None:
    assert answer("run", stored, *SHORT)["model"] == stored
    assert services.quantized == []


def test_a_folder_is_quantized_on_first_use_only(answer: Answer, run: Run, services: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    result = run("run", folder, *SHORT, "--json")
    assert json.loads(result.stdout)["model"] == "tiny-trellis-4bit"
    assert "this is done once" in result.stderr
    assert answer("run", folder, *SHORT)["model"] == "tiny-trellis-4bit"
    os.utime(folder / "model.safetensors")  # files that were touched are compared again
    answer("run", folder, *SHORT)
    assert len(services.quantized) == 1
    assert [info.name for info in services.store().list()] == ["tiny-trellis-4bit"]


def test_a_folder_is_found_under_any_name(answer: Answer, services: Any, checkpoint: Path) -> None:
    answer("quantize", checkpoint, "--name", "mine")
    assert answer("run", checkpoint, *SHORT)["model"] == "mine"
    answer("quantize", checkpoint, "--bits", 3, "--name", "other")
    assert answer("run", checkpoint, *SHORT)["model"] == "mine"
    assert len(services.quantized) == 2


@pytest.mark.parametrize("memory", ["kept", "lost", "damaged"])
def test_another_folder_of_that_name_is_another_model(
    error: Error, answer: Answer, services: Any, tmp_path: Path, memory: str
) -> None:
    first, second = write_checkpoint(tmp_path / "a" / "mine"), write_checkpoint(tmp_path / "b" / "mine", seed=2)
    for _ in range(2):
        answer("run", first, *SHORT)
    if memory == "lost":
        Origins(services.store()).file.unlink()
    if memory == "damaged":
        Origins(services.store()).file.write_text("[" * 100_000)
    assert "mine-trellis-4bit" in error("run", second, *SHORT)
    answer("quantize", second, "--name", "second")
    assert answer("run", second, *SHORT)["model"] == "second"
    assert answer("run", first, *SHORT)["model"] == "mine-trellis-4bit"


def test_a_checkpoint_that_changed_is_not_taken_for_the_old_one(error: Error, answer: Answer, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mine")
    for _ in range(2):
        answer("run", folder, *SHORT)
    weights, config = folder / "model.safetensors", folder / "config.json"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))  # of the same size
    assert "mine-trellis-4bit" in error("run", folder, *SHORT)
    weights.write_bytes(sound)
    answer("run", folder, *SHORT)
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 500.0}))
    assert "mine-trellis-4bit" in error("run", folder, *SHORT)


def test_a_gguf_file_is_quantized_on_first_use_only(
    answer: Answer, error: Error, services: Any, gguf_file: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert answer("run", gguf_file, *SHORT)["model"] == "tiny.Q8_0-trellis-4bit"
    assert len(services.quantized) == 1
    other = tmp_path / gguf_file.name
    content = gguf_file.read_bytes()
    other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "tiny.Q8_0-trellis-4bit" in error("run", other, *SHORT), "another file of that name is another model"


def test_a_gguf_file_of_4_bits_is_run_as_it_is(answer: Answer, run: Run, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.Q4_1.gguf", random_model("Llama", max_position_embeddings=160), kind="Q4_1")
    first = run("run", file, *SHORT)
    assert "with its own 4-bit weights" in first.stderr
    assert "residuals" in first.stderr
    assert answer("run", file, *SHORT)["model"] == "tiny.Q4_1-kept"
    assert answer("run", "tiny.Q4_1-kept", *SHORT, "--budget", "exact")["kv"] == "fp16", "kept, and as exact numbers"
    found = answer("show", "tiny.Q4_1-kept")
    assert (found["method"], found["residual_bits"], found["head_bits"]) == ("kept", 0, 4)
    assert ([way["kv"] for way in found["certificate"]["caches"]], found["cache"]) == (["int4"], "int4")
    assert found["certificate"]["kept"]
    for command in ("show", "verify"):
        assert "kept bit for bit" in " ".join(run(command, "tiny.Q4_1-kept").stdout.split())
    assert "nothing to compensate" in run("run", "tiny.Q4_1-kept", *SHORT, "--budget", 5).stderr
    refused = run("quantize", file, "--method", "kept", "--bits", 4, code=2)
    assert "kept takes bits and groups" in refused.stderr
    assert answer("quantize", file)["name"] == "tiny.Q4_1-trellis-4bit", "unless asked for it rounds"
    assert answer("quantize", file, "--method", "kept", "--name", "mine")["cpu_residual_bytes"] == 0


def test_show_says_what_the_source_s_weights_are(answer: Answer, run: Run, gguf_file: Path, stored: str) -> None:
    name = answer("quantize", gguf_file, "--bits", 3)["name"]
    found = answer("show", name)
    assert found["source"] == "tiny.Q8_0.gguf"
    assert found["source_types"].keys() == {"Q8_0"}
    assert "Q8_0 100 % (low-bit already)" in run("show", name).stdout
    assert answer("show", stored)["source_types"] is None


def test_a_gguf_file_is_evaluated_in_its_own_precision(answer: Answer, gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 4)
    found = answer("eval", gguf_file, "--text", tmp_path / "text", "--full-precision")
    assert found["tokens"] > 60
    assert found["perplexity"] > 1


def test_files_that_are_no_model(error: Error, services: Any, tmp_path: Path) -> None:
    assert "no config.json" in error("run", tmp_path, "hi")
    (tmp_path / "notes.txt").write_text("no model at all")
    assert "is not a GGUF file" in error("run", tmp_path / "notes.txt", "hi")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf" in error("run", tmp_path, "hi")
    assert "is cut off" in error("run", tmp_path / "model.gguf", "hi")
    assert not services.store().root.exists()


def test_a_short_name_is_fetched_and_quantized_once(answer: Answer, services: Any) -> None:
    for _ in range(2):
        assert answer("run", "smollm2-135m", *SHORT)["model"] == "smollm2-135m"
    assert services.fetched == ["smollm2-135m"]
    assert len(services.quantized) == 1
    assert answer("show", "smollm2-135m")["source"] == "smollm2-135m"


def test_a_short_name_in_other_verbs(answer: Answer, run: Run, services: Any) -> None:
    pulled = answer("pull", "smollm2-135m")
    assert Path(pulled["path"]).stat().st_size == pulled["bytes"]
    assert run("pull", "smollm2-135m").stdout == f"{pulled['path']}\n"
    assert "--revision" in run("pull", "smollm2-135m", "--revision", "main", code=2).stderr
    assert answer("quantize", "smollm2-135m", "--bits", 3)["name"] == "smollm2-135m-trellis-3bit"
    assert answer("run", "smollm2-135m", *SHORT)["model"] == "smollm2-135m"
    assert answer("quantize", "smollm2-135m", "--force", "--name", "again")["name"] == "again"
    for verb in (["pull"], ["run", *SHORT]):
        answer(verb[0], "Qwen3-0.6B", *verb[1:])
    assert services.pulled == [("Qwen/Qwen3-0.6B-GGUF", None)] * 2


def test_a_hub_name_is_downloaded_and_quantized_once(answer: Answer, services: Any) -> None:
    for _ in range(2):
        assert answer("run", "some/tiny", *SHORT)["model"] == "some/tiny-trellis-4bit"
    assert services.pulled == [("some/tiny", None)]
    assert len(services.quantized) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smal", "did you mean small?"),
        ("entirely-different", "stored: demo, small; to get: smollm2-135m, "),
        ("smollm2", "did you mean smollm2-135m?"),
        ("Qwen3-06b", "did you mean qwen3-0.6b?"),
        ("./nowhere", "there is no folder ./nowhere"),
        ("nowhere.gguf", "there is no file nowhere.gguf"),
        ("/nowhere/at/all", "there is no folder /nowhere/at/all"),
        ("../../nowhere", "there is no folder ../../nowhere"),
        ("a/b/c", "owner/name"),
        ("", "owner/name"),
    ],
)
def test_what_names_nothing(error: Error, stored: str, name: str, said: str) -> None:
    assert said in error("run", name, "hi")


def test_a_checkpoint_is_needed_where_a_low_bit_model_is_named(error: Error, stored: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("some text")
    for arguments in (("quantize", stored), ("eval", stored, "--text", file, "--full-precision")):
        line = error(*arguments)
        assert "hub name (tiny)" in line


def test_a_damaged_checkpoint(error: Error, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mine")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in error("run", folder, "hi")
