"""The machine and the versions that results were measured on."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import platform
import subprocess
from dataclasses import asdict
from typing import Any


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
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
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
