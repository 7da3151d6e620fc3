"""Stored models: list, show, rm and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.store.certificate import Certificate
from models.store.manifest import content_of

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
Error = Callable[..., str]
ENTRY = {
    "name", "bits", "bits_per_weight", "disk_bytes", "gpu_bytes", "active_bytes", "residual_bytes", "parameters",
    "family", "context", "bundled", "perplexity_before", "perplexity_after", "warning",
}  # fmt: skip


@pytest.mark.parametrize("verb", ["list", "ls"])
def test_list(answer: Answer, run: Run, stored: str, verb: str) -> None:
    found = answer(verb)
    assert found["damaged"] == []
    assert [(entry["name"], entry["bundled"]) for entry in found["models"]] == [("demo", True), (stored, False)]
    assert all(entry.keys() == ENTRY for entry in found["models"])
    header, demo, small = run(verb).stdout.splitlines()
    assert header.split()[:3] == ["NAME", "BITS", "SIZE"]
    assert demo.startswith("demo (bundled)")
    assert small.startswith("small ")
    assert len({len(line) for line in (demo, small)}) == 1


def test_a_damaged_model_is_listed_as_such(answer: Answer, run: Run, stored: str, services: Any) -> None:
    (services.store().root / stored / "recipe.json").unlink()
    found = answer("list")
    assert [entry["name"] for entry in found["models"]] == ["demo"]
    assert [entry["name"] for entry in found["damaged"]] == [stored]
    assert "small is damaged" in run("list").stderr


def test_files_of_other_programs_are_listed_and_named(
    answer: Answer, run: Run, error: Error, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    own = {"name": "llama.cpp:own.gguf", "bytes": 4, "path": str(tmp_path / "own.gguf")}
    assert own in answer("list", "--elsewhere")["files"]
    assert "llama.cpp:own.gguf" in run("list", "--elsewhere").stdout
    assert "own.gguf" in error("quantize", "llama.cpp:own.gguf"), "it is read there, and found to be cut off"
    assert "--elsewhere" in error("run", "ollama:qwen", "hi")


def test_a_missing_bundled_model_hides_no_other(answer: Answer, stored: str, services: Any, tmp_path: Path) -> None:
    services.packed = tmp_path / "nowhere"
    found = answer("list")
    assert [entry["name"] for entry in found["models"]] == [stored]
    assert [entry["name"] for entry in found["damaged"]] == ["demo"]


def test_show(answer: Answer, run: Run, error: Error, stored: str, services: Any) -> None:
    found = answer("show", stored)
    assert found.keys() == ENTRY | {
        "source", "source_types", "path", "method", "block_bits", "group_size", "residual_bits", "head_bits",
        "smooth_attention", "steps", "verified", "certificate", "cache", "base",
    }  # fmt: skip
    assert found["path"] == str(services.store().root / stored)
    assert (found["source"], found["method"], found["verified"]) == ("tiny", "gptq", False)
    assert answer("show", "demo")["bundled"] is True
    assert "group size          64" in run("show", stored).stdout
    assert "no stored model 'smal'" in error("show", "smal")


def test_verify_reads_every_byte(answer: Answer, error: Error, run: Run, stored: str, services: Any) -> None:
    assert answer("show", stored, "--verify")["verified"] is True
    file = services.store().root / stored / "outer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 7] ^= 1
    file.chmod(0o600)
    file.write_bytes(content)
    assert "outer.safetensors" in error("show", stored, "--verify")
    assert "outer.safetensors" in error("verify", stored)


def test_a_certificate_is_repeated(
    answer: Answer, error: Error, run: Run, checkpoint: Path, stored: str, services: Any
) -> None:
    assert "small has no certificate" not in run("show", stored).stdout
    assert "it has no certificate" in error("verify", stored)
    run("quantize", checkpoint, "--bits", 3, "--name", "three")
    said = answer("show", "three")["certificate"]
    assert [(way["kv"], way["k_chunk"]) for way in said["ways"]] == [("fp16", 0), ("fp16", 16)]
    plain, usual = said["ways"]
    assert [way["kv"] for way in said["caches"]] == ["int4"]
    assert 0 < usual["kl"] < plain["kl"]
    assert usual["perplexity"] == pytest.approx(answer("show", "three")["perplexity_after"], rel=0.02)
    assert f"k_chunk 16: KL {usual['kl']:.3f} nats a token" in run("show", "three").stdout
    found = answer("verify", "three")
    assert (found["ok"], found["apart"], found["tokens"]) == (True, [], said["tokens"])
    (answers,) = found["caches"]
    assert answers == {**said["caches"][0], "again": {name: said["caches"][0][name] for name in answers["again"]}}
    assert "answers, int4 cache" in run("verify", "three").stdout

    folder = services.store().root / "three"
    own = Certificate.read(folder)
    assert own is not None
    caches = replace(own.caches[0], kl=0.5), replace(own.caches[0], kv="int8")
    replace(own, ways=(), caches=caches).write(folder)
    assert "the default cache is int4, was int8" in run("verify", "three", code=1).stderr
    own = replace(own, caches=())
    for field, wrong in {"kl": 0.9 * plain["kl"] - 0.003, "same_percent": 3.0, "perplexity": 1.0}.items():
        replace(own, ways=(replace(own.ways[0], **{field: wrong}), *own.ways[1:])).write(folder)
        told = run("verify", "three", "--json", code=1)
        assert json.loads(told.stdout)["ok"] is False
        line = told.stderr.splitlines()[-1]
        assert f"(k_chunk 0, fp16 cache: {field} is " in line
        assert "doctor" in line
    replace(own, ways=(replace(own.ways[0], k_chunk=1024, prompt_k_chunk=1024),)).write(folder)
    (all_residuals,) = json.loads(run("verify", "three", "--json", code=1).stdout)["ways"]
    assert all_residuals["again"]["kl"] < 0.1 * plain["kl"]
    assert all_residuals["again"]["same_percent"] > 90
    replace(own, model="0" * 64).write(folder)
    assert "certificate.json belongs to other files" in error("verify", "three")
    for damage in ({"source_perplexity": 0}, {"ways": ()}, {"ways": (replace(own.ways[0], perplexity=0.0),)}):
        replace(own, **damage).write(folder)
        assert "certificate.json is damaged" in error("verify", "three")
    (folder / "certificate.json").write_text("{}")
    assert "certificate.json is damaged" in error("show", "three")


@pytest.fixture
def saved(services: Any, stored: str) -> tuple[Path, Path]:
    """Saved caches of the stored model and of another one."""
    chats, content = services.chats(), content_of(services.store().path(stored))
    chats.mkdir(parents=True)
    assert content is not None
    files = (chats / f"{content[:16]}-int4-x.kv", chats / "0123456789abcdef-int4-x.kv")
    for file in files:
        file.write_bytes(bytes(500))
    return files


def test_rm_takes_what_was_said_to_the_model(
    answer: Answer, error: Error, stored: str, saved: tuple[Path, Path], services: Any
) -> None:
    assert answer("rm", stored) == {"removed": stored}
    assert [file.exists() for file in saved] == [False, True]
    assert services.store().list() == []
    assert "no stored model" in error("rm", stored)


def test_a_model_that_is_replaced_takes_what_was_said_to_it(
    answer: Answer, stored: str, saved: tuple[Path, Path], checkpoint: Path
) -> None:
    answer("quantize", checkpoint, "--bits", 3, "--name", stored, "--force")
    assert [file.exists() for file in saved] == [False, True]


def test_rm_of_all_that_is_kept_of_chats(answer: Answer, run: Run, services: Any, saved: tuple[Path, Path]) -> None:
    assert answer("rm", "--chats") == {"removed_files": 2, "removed_bytes": 1000}
    assert not any(file.exists() for file in saved)
    assert len(services.store().list()) == 1
    assert run("rm", "--chats").stdout == "removed 0 saved caches of conversations, 0 B\n"
    for wrong in ((), ("small", "--chats")):
        run("rm", *wrong, code=2)


@pytest.mark.parametrize("name", ["demo", "../outside", "/etc", "a/b/c"])
def test_what_cannot_be_removed(error: Error, name: str) -> None:
    assert error("rm", name)


def test_export(answer: Answer, stored: str, tmp_path: Path) -> None:
    made = answer("export", stored, "--format", "awq", "--output", str(tmp_path / "out"))
    assert (made["name"], made["format"], made["path"]) == (stored, "awq", str(tmp_path / "out"))
    assert set(made["weights"]) == {"INT4", "F16"}
    assert made["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())


def test_export_for_a_person(run: Run, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("export", stored, "--format", "compressed-tensors", "--residuals")
    assert done.stdout.startswith(f"{stored}-compressed-tensors: ")
    assert "rounded to 4 bits anew" in done.stderr


def test_what_cannot_be_exported(error: Error, stored: str, tmp_path: Path) -> None:
    assert "there is no stored model 'nothing'" in error("export", "nothing", "--format", "gguf")
    # The tiny model's tokenizer has no place in a GGUF file.
    assert "cannot be exported as gguf" in error(
        "export", stored, "--format", "gguf", "--output", str(tmp_path / "out.gguf")
    )
    assert list(tmp_path.iterdir()) == []
