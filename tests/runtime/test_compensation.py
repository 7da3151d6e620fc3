"""Compensation settings: a k_chunk or a budget, and invalid values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runtime import compensation
from runtime.compensation import (
    DEFAULT_BUDGET_PERCENT,
    Compensation,
    k_chunk_by_type,
    k_chunk_of,
    layer_words,
    of_settings,
)
from runtime.errors import RequestError
from runtime.wire.requests import LoadRequest, TuneRequest

KINDS = ("qkv", "o", "gate_up", "down", "head")


def test_one_of_them_decides() -> None:
    fixed = Compensation(k_chunk={"down": 7})
    assert (fixed.budget_percent, fixed.by_type) == (None, {**dict.fromkeys(KINDS, 0), "down": 7})
    assert Compensation(k_chunk=3).by_type == dict.fromkeys(KINDS, 3)
    assert (fixed.prompt_percent, Compensation(k_chunk=0).prompt_percent) == (20, 0)
    assert (Compensation(budget_percent=0).prompt_percent, Compensation().prompt_percent) == (0, 20)
    assert Compensation(k_chunk=0, prompt_budget_percent=7).possible
    assert not Compensation(k_chunk=3, prompt_budget_percent=0).prompt_percent
    paid = Compensation(budget_percent=2.5)
    assert (paid.k_chunk, paid.by_type) == (None, dict.fromkeys(KINDS, 0))
    assert Compensation() == Compensation(budget_percent=DEFAULT_BUDGET_PERCENT)


def test_a_type_in_one_block_may_have_its_own() -> None:
    """Also in a block of experts, which share it."""
    wanted = {"layers.12.down": 0, "layers.3.qkv": 9, "layers.3.down": 64, "down": 7}
    names = ("layers.2.down", "layers.3.down", "layers.3.experts.5.down", "layers.12.down", "layers.3.qkv", "head")
    assert [k_chunk_of(wanted, name) for name in names] == [7, 64, 64, 0, 9, 0]
    spelled = k_chunk_by_type(wanted)
    assert list(spelled) == [*KINDS, "layers.3.qkv", "layers.3.down", "layers.12.down"]
    assert spelled == {**dict.fromkeys(KINDS, 0), **wanted}
    assert layer_words("layers.12.down") == "down of block 12"


@pytest.mark.parametrize(
    ("given", "possible"),
    [
        ({}, True),
        ({"budget_percent": 0.1}, True),
        ({"budget_percent": 0}, False),
        ({"k_chunk": 0}, False),
        ({"k_chunk": {"o": 0}}, False),
        ({"k_chunk": {"o": 1}}, True),
    ],
    ids=str,
)
def test_whether_anything_is_compensated(given: dict[str, Any], possible: bool) -> None:
    assert Compensation(**given).possible == possible


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"k_chunk": 0, "budget_percent": 5}, "exclude each other"),
        ({"k_chunk": 5, "budget_percent": 0}, "exclude each other"),
        ({"budget_percent": -0.5}, "0 to 100 percent, not -0.5"),
        ({"budget_percent": 100.5}, "0 to 100 percent, not 100.5"),
        ({"budget_percent": math.nan}, "not nan"),
        ({"exact": True, "k_chunk": 0}, "are not compensated"),
        ({"exact": True, "budget_percent": 5}, "are not compensated"),
        ({"k_chunk": 1025}, "k_chunk is 1025"),
        ({"k_chunk": {"o": -1}}, "k_chunk is -1"),
        ({"k_chunk": {"dwon": 7}}, "dwon"),
        ({"k_chunk": {"layers.3.dwon": 7}}, "layers.3.dwon"),
        ({"k_chunk": {"layers.x.down": 7}}, "layers.x.down"),
        ({"k_chunk": {"layers.03.down": 7}}, "layers.03.down"),
        ({"k_chunk": {"layers.3.down": 1025}}, "k_chunk is 1025"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Compensation(**given)


def test_what_goes_before_what() -> None:
    asked = Compensation(budget_percent=0)
    assert of_settings(7, 20, asked) is asked
    assert of_settings(7, 20) == of_settings(7, None) == Compensation(k_chunk=7)
    assert of_settings(0, 20) == Compensation(k_chunk=0), "0 is a number, too"
    assert of_settings(None, 0) == Compensation(budget_percent=0)
    assert of_settings(None, None) == Compensation()
    assert of_settings(None, None, prompt_budget=7).prompt_percent == 7
    assert of_settings(7, 20, asked, prompt_budget=7).prompt_percent == 0, "nothing was asked for"
    assert of_settings(None, 5, Compensation(k_chunk=3), prompt_budget=7).prompt_percent == 7
    assert of_settings(None, 5, Compensation(prompt_budget_percent=3), prompt_budget=7).prompt_percent == 3


def test_what_a_request_asks_for() -> None:
    assert LoadRequest(model="m").compensation is None, "that is left to the runtime"
    assert LoadRequest(model="m", budget=0).compensation == Compensation(budget_percent=0)
    assert LoadRequest(model="m", k_chunk=0).compensation == Compensation(k_chunk=0)
    assert LoadRequest(model="m", k_chunk={"o": 2}, budget=9).compensation == Compensation(k_chunk={"o": 2})
    assert LoadRequest(model="m", budget="exact").compensation == TuneRequest(budget="exact").compensation
    assert LoadRequest(model="m", budget="exact", or_usual=True).compensation == of_settings(None, "exact")
    assert not of_settings(None, "exact", prompt_budget=7).possible
    with pytest.raises(RequestError, match="are not compensated"):
        _ = LoadRequest(model="m", budget="exact", k_chunk=0).compensation
    assert TuneRequest().compensation == Compensation()
    assert TuneRequest(k_chunk=0).compensation == Compensation(k_chunk=0)
    with pytest.raises(RequestError, match="exclude each other"):
        _ = TuneRequest(k_chunk=0, budget=0).compensation


def test_k_chunk_by_layer_type() -> None:
    assert compensation.k_chunk_of(5, "layers.2.down") == 5
    assert compensation.k_chunk_of({"down": 7}, "layers.2.down") == 7
    assert compensation.k_chunk_of({"down": 7}, "layers.2.o") == 0
    assert compensation.k_chunk_of({"head": 3}, "head") == 3
