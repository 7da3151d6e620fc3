"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import smollm2

# Compiled kernels are shared by all tests and runs: compiling them takes many seconds.
os.environ.setdefault(
    "LOWBIT_CHAT_KERNEL_CACHE", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "kernels")
)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real models and texts that tests may read; tests that need it skip where it is absent."""
    if not (SHARED_DATA / "README.md").is_file():
        pytest.skip("needs the real models and texts of ../shared/data")
    return SHARED_DATA


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, fetched once into the tests' cache; skips where it can't be had."""
    return _available(smollm2.gguf_file)


@pytest.fixture(scope="session")
def smollm2_hf() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (fp16), converted independently of this program, or a skip."""
    return _available(smollm2.hf_folder)


def _available(find: Callable[[], Path]) -> Path:
    try:
        return find()
    except smollm2.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private LOWBIT_CHAT_HOME for every test, so that none touches the person's own models or settings."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("LOWBIT_CHAT_HOME", str(home))
    return home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that workers which share the files out end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
