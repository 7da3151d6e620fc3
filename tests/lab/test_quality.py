"""What `tests.lab.quality` measures is what the page shows."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.lab import measurements
from tests.lab.models import REAL
from tests.lab.quality import points
from tests.lab.store import RESULTS, digest, read


def test_every_point_is_shown_and_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        {"key": digest(asdict(one)), "model": REAL, "perplexity": 20.0, "recall": 0.9, **asdict(one)}
        for one in points()
    ]
    found: dict[str, Any] = {"sections": {**read(RESULTS / "quality.json")["sections"], "points": made}}
    asked, looked = set[str](), measurements._maybe

    def look(entries: Any, **wanted: object) -> Any:
        one = looked(entries, **wanted)
        if entries is made:
            assert one is not None, wanted
            asked.add(one["key"])
        return one

    monkeypatch.setattr(measurements, "_maybe", look)
    for shown in (measurements.chats, measurements.methods, measurements.selectors, measurements.residuals):
        shown(found)
    assert asked == {one["key"] for one in made}
    assert len(asked) == len(made)
