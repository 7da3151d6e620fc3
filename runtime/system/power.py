"""The machine's power supply."""

from __future__ import annotations


def on_battery() -> bool:
    """Whether the machine runs on a battery, as far as the system says."""
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False
