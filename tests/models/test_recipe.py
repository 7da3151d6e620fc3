"""Recipes: what they accept, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from models.errors import QuantizationError
from models.quantizers import quantizer
from models.recipe import DEFAULT_METHOD, GOOD_FOR, METHODS, Recipe


def test_json_round_trip() -> None:
    recipe = Recipe(bits=3, group_size=64, residual_bits=16, head_bits=3)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "magic", "unknown method 'magic'; choose one of: rtn"),
        ("bits", 5, "bits must be 3, 4 or a number between, not 5"),
        ("bits", 2.5, "bits must be 3, 4 or a number between, not 2.5"),
        ("bits", float("nan"), "bits must be"),
        ("bits", True, "bits must be"),
        ("bits", "3", "bits must be"),
        ("block_bits", (3, 4), "of a model of mixed bits"),
        ("group_size", 48, "multiple of 32"),
        ("group_size", 0, "multiple of 32"),
        ("group_size", -32, "multiple of 32"),
        ("residual_bits", 3, "residual_bits must be one of"),
        ("head_bits", 2, "head_bits must be one of"),
        ("expected_k_chunk", 513, "expected_k_chunk must be from 0 to 512"),
        ("expected_k_chunk", -1, "expected_k_chunk must be"),
        ("expected_k_chunk", 1.5, "whole number"),
        ("smooth_attention", 1, "smooth_attention must be true or false"),
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


def test_smooth_attention_is_written_where_it_is_chosen() -> None:
    assert "smooth_attention" not in Recipe().to_json()
    chosen = Recipe(smooth_attention=True)
    assert Recipe.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen


def test_the_head_has_bits_of_its_own() -> None:
    recipe = Recipe(bits=3)
    assert recipe.layer_bits("layers.0.qkv") == 3
    assert recipe.layer_bits("head") == 4


def test_blocks_of_a_mixed_model_have_their_own_bits() -> None:
    recipe = Recipe(bits=3.5)
    assert recipe.mixed
    assert not Recipe(bits=3.0).mixed
    with pytest.raises(QuantizationError, match=r"none for the block of layers\.1\.o"):
        recipe.layer_bits("layers.1.o")
    allocated = dataclasses.replace(recipe, block_bits=(4, 3))
    assert [allocated.layer_bits(name) for name in ("layers.0.o", "layers.1.o", "head")] == [4, 3, 4]
    assert Recipe.from_json(json.loads(json.dumps(allocated.to_json()))) == allocated
    assert "block_bits" not in recipe.to_json()
    with pytest.raises(QuantizationError, match="must hold 3 or 4"):
        dataclasses.replace(recipe, block_bits=(5, 3))


def test_every_method_is_said_to_be_good_for_something() -> None:
    assert tuple(GOOD_FOR) == METHODS
    assert DEFAULT_METHOD in METHODS


@pytest.mark.parametrize("bits", [2.99, 4.01, float("nan"), float("inf"), True, "3"])
def test_bits_that_are_none(bits: Any) -> None:
    with pytest.raises(QuantizationError, match="bits must be 3, 4 or a number between, not"):
        Recipe(bits=bits)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_code(method: str) -> None:
    found = quantizer(method, hessian=np.eye(8, dtype=np.float32), sensitivity=np.ones((4, 8), np.float32))
    assert callable(found)


def test_recipes_from_before_expected_compensation_expected_none() -> None:
    data = Recipe().to_json()
    assert data.pop("expected_k_chunk") == 64
    assert Recipe.from_json(data).expected_k_chunk == 0


def test_without_residuals_nothing_is_left_to_compensation() -> None:
    assert Recipe(expected_k_chunk=16).left_out == 16
    assert Recipe(expected_k_chunk=16, residual_bits=0).left_out == 0
