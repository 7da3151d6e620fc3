"""Detection of graphics cards through NVIDIA's management library, or on the PCI bus without it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_VENDORS: dict[str, Literal["nvidia", "amd", "intel"]] = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_DISPLAY_CLASS = "0x03"
_GIGABYTES_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One direction, after line coding, in 10^9 bytes per second."""
_GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16": 4, "16.0": 4, "32": 5, "32.0": 5, "64": 6,
                "64.0": 6}  # fmt: skip


ROOT = Path("/")
"""Root of the system's files; tests use another folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """The link between a graphics card and main memory, at its maximum speed; idle cards slow it down."""

    generation: int
    """Highest PCIe generation that card and slot share."""
    lanes: int
    """Lanes in use."""
    gb_s: float
    """Theoretical bandwidth of one direction, in 10^9 bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """A graphics card."""

    name: str
    """The driver's name for it, or its PCI id without a driver."""
    vendor: Literal["nvidia", "amd", "intel"]
    """Its maker."""
    memory_total_bytes: int | None
    """Its memory in bytes; None without a driver."""
    memory_free_bytes: int | None
    """Free memory now."""
    compute_capability: str | None
    """`8.9` for CUDA devices."""
    driver: str | None
    """Version of the driver; None without one."""
    pcie: PcieLink | None
    """Its link; None where unknown."""
    uuid: str | None = None
    """The driver's unique id of this card, `GPU-1f...`; NVML and CUDA number cards differently."""


def detect_gpus(root: Path = ROOT) -> tuple[GpuInfo, ...]:
    """All graphics cards; NVIDIA's with the driver's information, if there is a driver."""
    seen = tuple(_pci_gpus(root))
    if root != ROOT:
        return seen
    managed = tuple(_managed_gpus())
    return (*managed, *(gpu for gpu in seen if gpu.vendor != "nvidia")) if managed else seen


def link(generation: int, lanes: int) -> PcieLink | None:
    """A PCIe link by generation and lanes; None if either is invalid."""
    if generation not in _GIGABYTES_PER_LANE or lanes < 1:
        return None
    return PcieLink(generation=generation, lanes=lanes, gb_s=round(_GIGABYTES_PER_LANE[generation] * lanes, 1))


def _pci_gpus(root: Path) -> Iterator[GpuInfo]:
    folder = root / "sys/bus/pci/devices"
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        vendor = _VENDORS.get(_text(device / "vendor"))
        if vendor is None or not _text(device / "class").startswith(_DISPLAY_CLASS):
            continue
        speed = re.match(r"[\d.]+", _text(device / "max_link_speed"))
        lanes = _text(device / "current_link_width")
        generation = _GENERATIONS.get(speed[0], 0) if speed else 0
        yield GpuInfo(
            name=f"{vendor} {_text(device / 'device')} at {device.name}",
            vendor=vendor,
            memory_total_bytes=None,
            memory_free_bytes=None,
            compute_capability=None,
            driver=None,
            pcie=link(generation, int(lanes) if lanes.isdigit() else 0),
        )


def _managed_gpus() -> Iterator[GpuInfo]:
    """The cards that `nvidia-ml-py` reports, if it is installed and there is a driver."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        driver = _decoded(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            yield _managed_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index), driver)
    except pynvml.NVMLError:
        return
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _managed_gpu(nvml: Any, handle: Any, driver: str) -> GpuInfo:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    pcie = None
    with contextlib.suppress(nvml.NVMLError):  # a card on another kind of link has none
        pcie = link(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    return GpuInfo(
        name=_decoded(nvml.nvmlDeviceGetName(handle)),
        vendor="nvidia",
        memory_total_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        compute_capability=f"{major}.{minor}",
        driver=driver,
        pcie=pcie,
        uuid=_decoded(nvml.nvmlDeviceGetUUID(handle)),
    )


def _decoded(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
