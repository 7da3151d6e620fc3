"""The recommended sampling: what is taken of generation_config.json and of a GGUF file's metadata."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assets import demo_path
from models.generation_config import gguf_generation_config, recommended_sampling
from models.store import StoredModel
from models.store.layout import GENERATION_CONFIG

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645]}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"eos_token_id": 2}, {}),
        ({"temperature": 7, "top_p": 0, "top_k": True, "min_p": float("nan"), "repetition_penalty": "1.1"}, {}),
        ({"repetition_penalty": 1.1, "min_p": 0.05}, {"repetition_penalty": 1.1, "min_p": 0.05}),
        ({"presence_penalty": 1.5, "frequency_penalty": 3}, {"presence_penalty": 1.5}),
    ],
)
def test_what_is_no_recommendation_is_left_out(table: dict[str, Any], expected: dict[str, float]) -> None:
    assert recommended_sampling(table) == expected


def test_gguf_keys_become_those_of_transformers() -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 1.1, "general.sampling.top_k": "20"}
    assert gguf_generation_config(metadata) == {"temperature": 0.6, "repetition_penalty": 1.1}
    assert gguf_generation_config({"general.name": "x"}) == {}


def test_a_stored_model_tells_its_files_before_the_catalogues(tmp_path: Path) -> None:
    shutil.copytree(demo_path(), tmp_path / "demo")
    model = StoredModel.open_folder(tmp_path / "demo")
    assert model.sampling == {"temperature": 0.0}
    (tmp_path / "demo" / GENERATION_CONFIG).write_text("{}")
    for source in ("smollm2-135m", "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:F16"):
        model.info = replace(model.info, source=source)
        assert model.sampling == {"temperature": 0.2, "top_p": 0.9}
    model.info = replace(model.info, source="HuggingFaceTB/Other")
    assert model.sampling == {}
    (tmp_path / "demo" / GENERATION_CONFIG).write_text(json.dumps(QWEN3))
    assert model.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
