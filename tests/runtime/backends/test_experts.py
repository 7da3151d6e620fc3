"""Which experts of a block are read most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.spec import MixtureSpec
from runtime.backends.experts import hit_rate, hottest

MIXTURE = MixtureSpec(experts=5, chosen=2, width=8, normalized=True, shared=1)
TOKENS = np.array([3, 9, 0, 9, 4, 16], np.int32)


def test_shared_experts_come_first_and_then_those_that_calibration_reached_most() -> None:
    assert hottest(TOKENS, 0, MIXTURE) == ()
    assert hottest(TOKENS, 1, MIXTURE) == (5,)
    assert hottest(TOKENS, 4, MIXTURE) == (5, 1, 3, 4)


def test_the_hit_rate_is_that_of_calibration(tiny_model: Any, tiny_spec: Any) -> None:
    """The mean of blocks, of which one was never counted, and blocks without experts do not matter."""
    spec = tiny_spec(num_layers=3, mixture=replace(MIXTURE, dense=(0,)))
    model = tiny_model(spec)
    model.expert_tokens = {1: TOKENS, 2: np.zeros(6, np.int32)}.__getitem__
    assert hit_rate(model, 0) == 0
    assert hit_rate(model, 3) == pytest.approx(((16 + 9 + 9) / 41 + 3 / 6) / 2)
    assert hit_rate(model, 6) == 1
