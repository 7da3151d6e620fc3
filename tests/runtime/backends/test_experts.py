"""Which experts of a block are read most."""

from __future__ import annotations

import numpy as np

from models.spec import MixtureSpec
from runtime.backends.experts import hottest

MIXTURE = MixtureSpec(experts=5, chosen=2, width=8, normalized=True, shared=1)
TOKENS = np.array([3, 9, 0, 9, 4, 16], np.int32)


def test_shared_experts_come_first_and_then_those_that_calibration_reached_most() -> None:
    assert hottest(TOKENS, 0, MIXTURE) == ()
    assert hottest(TOKENS, 1, MIXTURE) == (5,)
    assert hottest(TOKENS, 4, MIXTURE) == (5, 1, 3, 4)
