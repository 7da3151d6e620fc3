"""A few seconds of the soak; `python -m tests.lab.soak` does ten minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.lab.soak import Seen, growth, soaked


@pytest.mark.slow
def test_every_request_has_an_end(tmp_path: Path) -> None:
    found = soaked(["demo"], tmp_path, minutes=0.1, clients=8, parallel=2, seed=1)
    assert found["wrong"] == []
    assert found["requests"] > 8
    assert set(found["ends"]) <= {"stop", "length", "hung up", "left in the middle", "refused, 404", "refused, 503"}


def test_growth_is_that_of_the_second_half() -> None:
    seen = Seen(ends=Counter(stop=3))
    seen.memory = [(float(at), 100.0 + (50 if at > 60 else 0) + max(0, at - 120) / 30, 0) for at in range(240)]
    assert growth(seen.memory) == pytest.approx(2.0, abs=0.01)
    assert growth(seen.memory[:1]) == 0
