"""The request for shared memory while products run."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from runtime.backends.triton import carveout
from runtime.backends.triton.carveout import leave_room

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
    carveout._ask.cache_clear()
    monkeypatch.setattr(carveout, "_driver", lambda: found)
    properties = SimpleNamespace(shared_memory_per_multiprocessor=100 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return found


@pytest.mark.parametrize("driver", [0, 1], indirect=True, ids=["granted", "refused"])
def test_each_kernel_asks_once(driver: _Driver) -> None:
    for function in (70, 70, 71):
        leave_room(SimpleNamespace(function=function), DEVICE)
    assert driver.asked == [(70, 9, 32), (71, 9, 32)]


def test_nothing_is_asked_where_nothing_was_compiled(driver: _Driver) -> None:
    leave_room(None, DEVICE)
    leave_room(SimpleNamespace(function=70), torch.device("cpu"))
    assert not driver.asked
