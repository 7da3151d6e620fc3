"""Inspection of the server's machine."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.backends import backends
from runtime.errors import Problem
from runtime.system.power import power_words
from runtime.wire.device import DeviceReport
from tuner.gpu import GpuInfo

_FEW_LANES = 4


def link_problems(gpu: GpuInfo | None) -> list[Problem]:
    """Problems of the link between a card and main memory, which compensation reads across."""
    if gpu is None:
        return []
    if gpu.pcie is None:
        what = f"how {gpu.name} is connected to main memory is unknown, so only measuring tells what its link can do"
        return [Problem(what=what, fix="update the card's driver, or look with: nvidia-smi -q")]
    if gpu.pcie.lanes < _FEW_LANES:
        what = f"{gpu.name} uses {gpu.pcie.lanes} PCIe lanes, so little can be compensated"
        return [Problem(what=what, fix="put it into a slot with more lanes, or look at the mainboard's settings")]
    return []


def link_gb_s() -> float | None:
    """Measured bandwidth of the link that residuals cross; None if no usable backend has one."""
    speeds = (backend.link_gb_s() for backend in backends())
    return next((speed for speed in speeds if speed is not None), None)


class MachineInspector:
    """Inspects this machine. Thread-safe.

    Args:
        folder: Folder where the measured bandwidth is stored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._gb_s: float | None = None
        self._link_gb_s: float | None = None

    def __call__(self, idle: bool) -> DeviceReport:
        """See `runtime.server.service.interfaces.Inspector`. Measures the memory once, when idle."""
        from tuner.detect import detect

        machine = detect()
        gpu = machine.gpus[0] if machine.gpus else None
        return DeviceReport(
            machine={
                "cpu": asdict(machine.cpu),
                "power": power_words(),
                "memory": asdict(machine.memory),
                "gpu": None if gpu is None else asdict(gpu),
                "pcie": self._link(gpu, idle=idle),
            },
            bandwidth_gb_s=self._bandwidth(idle=idle),
            problems=link_problems(gpu),
        )

    def _link(self, gpu: GpuInfo | None, *, idle: bool) -> dict[str, Any] | None:
        if gpu is None or gpu.pcie is None:
            return None
        with self._lock:
            if self._link_gb_s is None and idle:
                self._link_gb_s = link_gb_s()
            return {**asdict(gpu.pcie), "measured_gb_s": self._link_gb_s}

    def _bandwidth(self, *, idle: bool) -> float | None:
        with self._lock:
            if self._gb_s is None and idle:
                from tuner.bandwidth import read_bandwidth

                self._gb_s = read_bandwidth(self._folder).gb_s
            return self._gb_s
