"""What the system says of power and clocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from runtime.system.power import clock_limit, power_words


@pytest.mark.parametrize(
    ("plugged", "allowed", "said"),
    [
        (True, "3400000", None),
        (False, "3400000", "on battery"),
        (True, "1700000", "the clock may reach 50 % of its highest"),
        (False, "1700000", "on battery; the clock may reach 50 % of its highest"),
        (None, "", None),
    ],
)
def test_it_says_what_slows_the_machine_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugged: bool | None, allowed: str, said: str | None
) -> None:
    battery = None if plugged is None else SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    folder = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_max_freq").write_text(f"{allowed}\n")
    (folder / "cpuinfo_max_freq").write_text("3400000\n")
    assert power_words(tmp_path) == said
    assert clock_limit(tmp_path / "elsewhere") is None
