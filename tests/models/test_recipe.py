"""Recipes: what they accept, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from models.errors import QuantizationError
from models.recipe import DEFAULT_METHOD, GOOD_FOR, METHODS, Recipe


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "magic", "unknown method 'magic'; choose one of: rtn"),
        ("bits", 5, "bits must be 3, 4 or a number between, not 5"),
        ("bits", 2.5, "bits must be 3, 4 or a number between, not 2.5"),
        *(
            ("bits", bits, "bits must be 3, 4 or a number between, not")
            for bits in (2.99, 4.01, float("nan"), float("inf"), True, "3")
        ),
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


def test_the_json_form_is_read_back() -> None:
    for recipe in (Recipe(bits=3, group_size=64, residual_bits=16, head_bits=3), Recipe(smooth_attention=True)):
        assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    data = Recipe().to_json()
    assert "smooth_attention" not in data
    with pytest.raises(QuantizationError, match="unknown recipe keys: extra"):
        Recipe.from_json({**data, "extra": 1})
    with pytest.raises(QuantizationError, match="missing: bits"):
        Recipe.from_json({key: value for key, value in data.items() if key != "bits"})
    with pytest.raises(QuantizationError, match="JSON object"):
        Recipe.from_json([])
    assert data.pop("expected_k_chunk") == 64
    assert Recipe.from_json(data).expected_k_chunk == 0, "recipes from before compensation was expected"


def test_what_follows_from_a_recipe() -> None:
    assert [Recipe(bits=3).layer_bits(name) for name in ("layers.0.qkv", "head")] == [3, 4]
    assert [Recipe(expected_k_chunk=16, residual_bits=bits).left_out for bits in (4, 0)] == [16, 0]


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
    assert tuple(GOOD_FOR) == ("auto", *METHODS)
    assert DEFAULT_METHOD in METHODS
