"""The request for shared memory while products run."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from runtime.backends.triton import workspace
from runtime.backends.triton.kernels import compensate, gemv
from runtime.backends.triton.workspace import leave_room
from tests.lab.gpu.layers import CompensatedLayer, request

DEVICE = torch.device("cuda", 0)


class _Driver:
    """Stands for the CUDA driver and keeps what it is asked."""

    def __init__(self, answer: int) -> None:
        self.answer, self.asked = answer, list[tuple[int | None, int, int]]()

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.asked.append((function.value, attribute, value))
        return self.answer


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Driver:
    found = _Driver(getattr(request, "param", 0))
    monkeypatch.setattr(workspace, "_asked", {})
    monkeypatch.setattr(workspace, "_driver", lambda: found)
    properties = SimpleNamespace(shared_memory_per_multiprocessor=100 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return found


@pytest.mark.parametrize("driver", [0, 1], indirect=True, ids=["granted", "refused"])
def test_each_kernel_asks_once(driver: _Driver) -> None:
    for function in (70, 70, 71):
        leave_room(SimpleNamespace(function=function), DEVICE, "product")
    assert driver.asked == [(70, 9, 32), (71, 9, 32)]


def test_nothing_is_asked_where_nothing_was_compiled(driver: _Driver) -> None:
    leave_room(None, DEVICE, "product")
    leave_room(SimpleNamespace(function=70), torch.device("cpu"), "product")
    assert not driver.asked


def test_product_and_compensation_ask_for_the_same(driver: _Driver) -> None:
    """Either may be launched first; and what asking does can be measured."""
    leave_room(SimpleNamespace(function=70), DEVICE, "compensation")
    leave_room(SimpleNamespace(function=71), DEVICE, "product")
    assert {value for _, _, value in driver.asked} == {32}
    request("compensation", asked=False)
    request("compensation", asked=True)
    assert driver.asked[2:] == [(70, 9, -1), (70, 9, 32)]


def test_both_kernels_ask(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Every launch of a product of few rows, and of a compensation in one launch or in two."""
    asked: list[str] = []
    for module in (compensate, gemv):
        monkeypatch.setattr(module, "leave_room", lambda _launched, _device, kernel: asked.append(kernel))
    layer = CompensatedLayer("o", (32, 64), 4, 16, torch.device(device), inputs=2)
    layer.product()
    layer.compensation(1)
    layer.compensation(1, fused=False)
    layer.both(1)
    assert asked == ["product", "compensation", "compensation", "both"]
