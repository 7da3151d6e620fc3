"""What is kept of a run: the machine and its versions, and rows of each part, saved to disk one by one."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lab.store import commit, today, write

Row = dict[str, Any]


class Part:
    """The rows of one part.

    Args:
        file: Where they are kept.
        seconds: How long the part should take.
        card: The name of the card, which stands in every row.
    """

    def __init__(self, file: Path, seconds: float, card: str | None) -> None:
        self._file, self._seconds, self._begin, self._card = file, seconds, time.monotonic(), card
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Keep and print a row."""
        self.rows.append({"card": self._card} | row)
        write(self._file, self.rows)
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def begin(self, row: Row) -> bool:
        """Note what is measured next, so that the last row of a part that hangs says at what.

        Returns:
            Whether there is time for it; where not, the row says so.
        """
        if time.monotonic() - self._begin > self._seconds:
            self.add({"what": "left out for want of time"} | row)
            return False
        write(self._file, [*self.rows, {"what": "begun"} | row])
        return True


def device_name() -> str | None:
    """The GPU's name; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def describe() -> dict[str, Any]:
    """Date, device, driver and versions, as a result file names them."""
    import torch

    from tuner.detect import detect

    machine = detect()
    found: dict[str, Any] = {
        "date": today(),
        "commit": commit(),
        "cpu": machine.cpu.name,
        "device": None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{name: _version(name) for name in ("triton", "gemlite", "numpy")},
        },
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        managed = [gpu for gpu in machine.gpus if gpu.vendor == "nvidia"]
        found["device"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "driver": _driver(),
            "pcie": asdict(managed[0].pcie) if managed and managed[0].pcie else None,
        }
    return found


def _driver() -> str | None:
    """Version of the driver, from the program that comes with it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
