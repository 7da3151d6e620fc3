"""The machine's power supply, and limits of the processor's clock."""

from __future__ import annotations

from pathlib import Path

_CLOCKS = "sys/devices/system/cpu/cpu{}/cpufreq"
_HELD = 0.95
"""A clock is limited if it may not reach this share of its highest frequency."""


def on_battery() -> bool:
    """Whether the machine runs on a battery, as far as the system says."""
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def clock_limit(root: Path = Path("/")) -> float | None:
    """Share of its highest clock that the first core may reach, if power saving or heat limits it; Linux alone tells.

    Source: Linux, Documentation/admin-guide/pm/cpufreq.rst (scaling_max_freq, cpuinfo_max_freq).
    """
    folder = root / _CLOCKS.format(0)
    try:
        allowed, highest = (int((folder / name).read_text()) for name in ("scaling_max_freq", "cpuinfo_max_freq"))
    except (OSError, ValueError):
        return None
    share = allowed / highest if highest > 0 else 1.0
    return share if share < _HELD else None


def power_words(root: Path = Path("/")) -> str | None:
    """What slows measurements down, for the user; None if nothing does, as far as the system says."""
    limit = clock_limit(root)
    held = None if limit is None else f"the clock may reach {100 * limit:.0f} % of its highest"
    return "; ".join(filter(None, ["on battery" if on_battery() else None, held])) or None
