from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tuner.gpu import PcieLink, _managed_gpus, link


class NVMLError(Exception):
    pass


def library(**changes: Any) -> ModuleType:
    """NVIDIA's management library with one card."""
    module = ModuleType("pynvml")
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"550.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: "Some Card",
        "nvmlDeviceGetUUID": lambda _: b"GPU-1f2e",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=6 << 30, free=5 << 30),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (8, 6),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 4,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
    }
    for name, value in {**functions, **changes}.items():
        setattr(module, name, value)
    return module


def refuse(*_: Any) -> None:
    raise NVMLError("no")


def test_what_the_library_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    (gpu,) = _managed_gpus()
    assert (gpu.name, gpu.vendor, gpu.driver, gpu.compute_capability) == ("Some Card", "nvidia", "550.1", "8.6")
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (6 << 30, 5 << 30)
    assert gpu.pcie == PcieLink(generation=4, lanes=8, gb_s=15.8)
    assert gpu.uuid == "GPU-1f2e"


def test_a_card_without_a_pcie_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlDeviceGetMaxPcieLinkGeneration=refuse))
    assert [gpu.pcie for gpu in _managed_gpus()] == [None]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_driver_that_does_not_answer_is_no_card(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(**{broken: refuse}))
    assert list(_managed_gpus()) == []


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list(_managed_gpus()) == []


@pytest.mark.parametrize(("generation", "lanes"), [(0, 16), (9, 16), (4, 0)])
def test_links_that_make_no_sense(generation: int, lanes: int) -> None:
    assert link(generation, lanes) is None
