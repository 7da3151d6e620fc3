"""Each test of the contract runs on the kernels of every backend that has any of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.backends.contract.kernels import Kernels
from tests.runtime.backends.triton.interpreter import DEVICE, patched_once


@pytest.fixture(scope="module", params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """A backend's kernels; modules with kernels are imported only where they are asked for."""
    if request.param == "cpu":
        from tests.runtime.backends.contract.on_cpu import CpuKernels

        yield CpuKernels()
        return
    from tests.runtime.backends.contract.on_triton import TritonKernels

    with patched_once():
        yield TritonKernels(DEVICE)
