"""Where Triton kernels run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.runtime.backends.triton.interpreter import DEVICE, HAS_CUDA, patched_once
from tests.runtime.conftest import make_model, make_spec


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once() -> Iterator[None]:
    """The interpreter without what it does again and again."""
    with patched_once():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: `cuda`, or `cpu` under the interpreter."""
    return DEVICE


@pytest.fixture(scope="session")
def cuda() -> str:
    """The GPU, for tests that make sense only there."""
    if not HAS_CUDA:
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture
def _order(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs from the first on; a card does as it likes."""
    if request.param == "forwards" or device == "cuda":
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def backwards(*place: int) -> None:
        forwards(*(count - 1 - at for count, at in zip(builder.grid_dim, place, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)


@pytest.fixture
def small() -> Callable[..., Any]:
    """Makes models as small as `SMALL`: fields of their spec that differ, and how they are packed."""
    from tests.runtime.backends.triton.decoding import SMALL

    def make(changes: Mapping[str, Any] | None = None, **build: Any) -> Any:
        return make_model(make_spec(**{**SMALL, **(changes or {})}), **build)

    return make


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread of torch: references are small, and its threads collapse where cores are contended."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
