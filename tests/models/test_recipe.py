"""Recipes: what they accept, and their JSON form."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from models.errors import QuantizationError
from models.quantizers import quantizer
from models.recipe import METHOD_BITS, Recipe


def test_json_round_trip() -> None:
    recipe = Recipe(bits=3, group_size=64, residual_bits=16, head_bits=3)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "magic", "unknown method 'magic'; choose one of: rtn"),
        ("bits", 5, "does not make 5-bit models; choose one of: 3, 4"),
        ("bits", 3.0, "whole number"),
        ("bits", True, "whole number"),
        ("group_size", 48, "multiple of 32"),
        ("group_size", 0, "multiple of 32"),
        ("group_size", -32, "multiple of 32"),
        ("residual_bits", 3, "residual_bits must be one of"),
        ("head_bits", 2, "head_bits must be one of"),
    ],
)
def test_bad_values_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        Recipe(**{field: value})


def test_unknown_and_missing_keys_are_errors() -> None:
    data = Recipe().to_json()
    with pytest.raises(QuantizationError, match="unknown recipe keys: extra"):
        Recipe.from_json({**data, "extra": 1})
    with pytest.raises(QuantizationError, match="missing: bits"):
        Recipe.from_json({key: value for key, value in data.items() if key != "bits"})
    with pytest.raises(QuantizationError, match="JSON object"):
        Recipe.from_json([])


def test_the_head_has_bits_and_method_of_its_own() -> None:
    recipe = Recipe(bits=3)
    assert recipe.layer_bits("layers.0.qkv") == 3
    assert recipe.layer_bits("head") == 4
    assert recipe.layer_method("head") == "rtn"


@pytest.mark.parametrize("method", METHOD_BITS)
def test_every_method_has_code(method: str) -> None:
    assert callable(quantizer(method, np.eye(8, dtype=np.float32)))
