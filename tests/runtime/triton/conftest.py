"""Triton kernels are tested on a GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel module is imported


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: `cuda`, or `cpu` under the interpreter."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(scope="session")
def cuda() -> str:
    """The GPU, for tests that make sense only there."""
    if not HAS_CUDA:
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread of torch: references are small, and its threads collapse where cores are contended."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
