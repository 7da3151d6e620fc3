"""Human-readable progress of a download."""

from __future__ import annotations

import pytest

from models.hub.meter import Meter, bytes_text, duration_text, free_text
from models.progress import Progress


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (812e6, "812 MB"),
        (999_700_000, "1.00 GB"),
        (4.97e9, "4.97 GB"),
        (1.5e15, "1500 TB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_what_is_free_differs_from_what_is_needed() -> None:
    assert free_text(4_974_000_000, 4_982_000_000) == "4.97 GB"
    assert free_text(4_974_000_000, 4_974_000_012) == "12 B less"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5940, "99 min"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_speed_counts_only_what_came_and_time_left_follows_from_it() -> None:
    now = 0.0
    reports: list[Progress] = []
    meter = Meter(reports.append, 10_000_000, clock=lambda: now)
    meter.begin("model.safetensors")
    meter.found(4_000_000)
    for _ in range(20):
        now += 0.5
        meter.received(100_000)
    assert (reports[-1].done, reports[-1].total) == (6_000_000.0, 10_000_000.0)
    assert reports[-1].message == "model.safetensors: 6.00 MB of 10.0 MB, 200 kB/s, 20 s left"
    assert reports[0].message == "model.safetensors: 4.00 MB of 10.0 MB"


def test_reports_are_not_too_many() -> None:
    now = 0.0
    reports: list[Progress] = []
    meter = Meter(reports.append, 1000, clock=lambda: now)
    for _ in range(1000):
        now += 0.001
        meter.received(1)
    meter.finish()
    assert 4 <= len(reports) <= 8
    assert reports[-1].done == 1000
