"""Names of stored models."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import StoreError
from models.recipe import Recipe
from models.store.names import check_name, default_name, folder_of, name_of


@given(st.text(max_size=40))
def test_a_folder_lies_directly_in_the_store_and_leads_back(name: str) -> None:
    try:
        folder = folder_of(name)
    except StoreError:
        return
    assert Path(folder).name == folder
    assert not folder.startswith(".")
    assert (Path("/store") / folder).resolve().parent == Path("/store")
    assert name_of(folder) == name


@pytest.mark.parametrize("name", ["a", "Qwen/Qwen2.5-0.5B", "model_1.0-x", "9"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["a/", "/a", "-a", "a-", "a..b", "a--b", "a/b/c", "a\n", "a\0", "~", "con:", "x" * 151]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(StoreError, match="not a good model name"):
        check_name(name)


@pytest.mark.parametrize(
    ("folder", "recipe", "name"),
    [
        ("english3m", Recipe(bits=3), "english3m-gptq-3bit"),
        ("My Model (v2)", Recipe(), "My-Model-v2-gptq-4bit"),
        ("...", Recipe(), "model-gptq-4bit"),
        ("a--b..c", Recipe(), "a-b.c-gptq-4bit"),
        ("m", Recipe(group_size=128, residual_bits=8, head_bits=3), "m-gptq-4bit-g128-r8-h3"),
        ("m", Recipe(group_size=128, smooth_attention=True), "m-gptq-4bit-g128-sa"),
        ("m", Recipe.usual("qoq"), "m-qoq-4bit"),
        ("m", Recipe.usual("qoq", group_size=0, rotate=True), "m-qoq-4bit-g0-rotate"),
        ("m", Recipe.usual("qoq", clip=False), "m-qoq-4bit-no-clip"),
        ("models--Qwen--Qwen2.5-0.5B/snapshots/0123abc", Recipe(bits=3), "Qwen/Qwen2.5-0.5B-gptq-3bit"),
        ("models--gpt/snapshots/0123abc", Recipe(), "gpt-gptq-4bit"),
        ("models--a--b-GGUF/snapshots/0123abc/b-Q8_0.gguf", Recipe(), "a/b-GGUF-gptq-4bit"),
        ("models--a--b-GGUF/snapshots/0123abc/b.Q4_K_M.gguf", Recipe(), "a/b-GGUF-Q4_K_M-gptq-4bit"),
        ("x" * 200, Recipe(), "x" * 60 + "-gptq-4bit"),
    ],
)
def test_default_names(tmp_path: Path, folder: str, recipe: Recipe, name: str) -> None:
    assert default_name(tmp_path / folder, recipe) == name
