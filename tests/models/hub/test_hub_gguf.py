"""GGUF files from the hub: which one is taken, and where it is found again."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from models.errors import CheckpointError, HubUnreachableError
from models.gguf.header import type_of
from models.hub import cached, pull
from models.store.store import made_of_hub, source_name
from tests.models.conftest import content
from tests.models.hub.test_hub_pull import QUICK

NAME = "owner/Tiny-GGUF"
FILES = {
    "README.md": b"#",
    "Tiny-Q4_K_M.gguf": b"four",
    "Tiny-Q8_0.gguf": b"eight",
    "Tiny-BF16.gguf": b"sixteen",
    "mmproj-Tiny-Q8_0.gguf": b"eyes",
    "old/Tiny-Q8_0.gguf": b"elsewhere",
}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("Qwen3-4B-Q8_0.gguf", "Q8_0"),
        ("qwen2.5-0.5b-instruct-fp16.gguf", "F16"),
        ("SmolLM2-135M.Q4_1.gguf", "Q4_1"),
        ("m-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("m-Q8_0-00002-of-00003.gguf", "Q8_0"),
        ("model.gguf", None),
        ("m-Q8_0.safetensors", None),
        ("Q8_0.gguf", None),
    ],
)
def test_types_in_file_names(file: str, expected: str | None) -> None:
    assert type_of(file) == expected


@pytest.mark.parametrize(
    ("asked", "there", "taken"),
    [
        ("", FILES, "Tiny-Q8_0.gguf"),
        (":q4_k_m", FILES, "Tiny-Q4_K_M.gguf"),
        ("", {name: FILES[name] for name in FILES if "Q8_0" not in name}, "Tiny-BF16.gguf"),
        ("", {"model.gguf": b"one"}, "model.gguf"),
        (":Q8_0", {**FILES, "config.json": b"{}", "model.safetensors": b"both"}, "Tiny-Q8_0.gguf"),
    ],
    ids=["eight-bits", "asked", "sixteen-bits", "single", "beside-safetensors"],
)
def test_one_file_is_taken(hub: Any, cache: Path, asked: str, there: dict[str, bytes], taken: str) -> None:
    commit = hub.add(NAME, there)
    path = pull(NAME + asked, endpoint=hub.url, cache_dir=cache)
    assert path == cache / "models--owner--Tiny-GGUF" / "snapshots" / commit / taken
    assert content(path.parent) == {taken: there[taken]}
    assert [entry.file for entry in hub.sent()] == [taken]
    assert cached(NAME + asked, cache_dir=cache) == path
    assert made_of_hub(source_name(path), NAME + asked) or taken == "model.gguf"


def test_a_model_in_parts_comes_whole(hub: Any, cache: Path) -> None:
    parts = {f"Tiny-Q8_0-0000{number}-of-00003.gguf": bytes([number]) * 9 for number in (1, 2, 3)}
    hub.add(NAME, {**parts, "Tiny-BF16-00001-of-00002.gguf": b"half", "Tiny-Q4_0.gguf": b"four"})
    path = pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert path.name == "Tiny-Q8_0-00001-of-00003.gguf"
    assert content(path.parent) == parts
    assert cached(NAME, cache_dir=cache) == path
    assert source_name(path) == NAME
    with pytest.raises(CheckpointError, match=r"no GGUF file of type BF16 \(there are: Q4_0, Q8_0\)"):
        pull(f"{NAME}:BF16", endpoint=hub.url, cache_dir=cache)
    (path.parent / "Tiny-Q8_0-00002-of-00003.gguf").unlink()
    assert cached(NAME, cache_dir=cache) is None


def test_safetensors_come_first(hub: Any, cache: Path) -> None:
    hub.add(NAME, {**FILES, "config.json": b"{}", "model.safetensors": b"weights"})
    assert content(pull(NAME, endpoint=hub.url, cache_dir=cache)) == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }


def test_a_type_that_is_not_there_is_named_with_those_that_are(hub: Any, cache: Path) -> None:
    hub.add(NAME, FILES)
    with pytest.raises(CheckpointError, match=r"no GGUF file of type Q6_K \(there are: BF16, Q4_K_M, Q8_0\)"):
        pull(f"{NAME}:Q6_K", endpoint=hub.url, cache_dir=cache)
    assert not hub.sent()


def test_a_file_in_the_cache_serves_when_the_hub_is_down_but_only_as_its_type(hub: Any, cache: Path) -> None:
    hub.add(NAME, FILES)
    four = pull(f"{NAME}:Q4_K_M", endpoint=hub.url, cache_dir=cache)
    hub.faults.always = ("/api/", 503, {})
    assert pull(f"{NAME}:Q4_K_M", endpoint=hub.url, cache_dir=cache, policy=QUICK) == four
    assert cached(NAME, cache_dir=cache) is None
    with pytest.raises(HubUnreachableError):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)


def test_a_broken_download_goes_on_within_the_file(hub: Any, cache: Path) -> None:
    big = bytes(range(256)) * 4096
    hub.add(NAME, {"Tiny-Q8_0.gguf": big})
    hub.faults.cut_after["Tiny-Q8_0.gguf"] = deque([400_000])
    path = pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert path.read_bytes() == big
    assert [entry.start > 0 for entry in hub.sent("Tiny-Q8_0.gguf")] == [False, True]
