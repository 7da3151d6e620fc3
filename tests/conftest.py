"""Fixtures shared by the whole suite."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from app.tui.preload import FULL_EVERY
from tests import real_models

# Compiled kernels are shared by all tests and runs: compiling them takes many seconds.
os.environ.setdefault(
    "LOWBIT_CHAT_KERNEL_CACHE", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "kernels")
)

# Whatever the developer's language. The first text that is looked up decides, and the imports above look up none.
os.environ["LANGUAGE"] = "en"

# Matrices in tests are small: to share one out takes longer than to multiply it, several times so beside other workers.
# numpy and torch read this when they are imported, here and in the programs that tests start.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

# Bytecode is kept even where the environment forbids it: tests start many processes, and each would compile all anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says how busy the machine is.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

LAB = Path(__file__).resolve().parent / "lab"
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Collect all garbage less often, as the program does: that took a quarter of the time of the UI's tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_EVERY)


@pytest.fixture(scope="module", autouse=True)
def _only_their_own_garbage() -> None:
    """Let tests collect the garbage of their own file only: unloading a model does, while many modules are loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real models and texts that tests may read; tests that need it skip where it is absent."""
    if not (SHARED_DATA / "README.md").is_file():
        pytest.skip("needs the real models and texts of ../shared/data")
    return SHARED_DATA


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, fetched once into the tests' cache; skips where it can't be had."""
    return _available(real_models.gguf_file)


@pytest.fixture(scope="session")
def smollm2_hf() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (fp16), converted independently of this program, or a skip."""
    return _available(real_models.hf_folder)


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M as GGUF, fetched once into the tests' cache; skips where it can't be had."""
    return _available(real_models.gemma_file)


def _available(find: Callable[[], Path]) -> Path:
    try:
        return find()
    except real_models.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of folders for `isolated_home`. `mktemp` would look through all earlier ones for the next number."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def isolated_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private LOWBIT_CHAT_HOME for every test, so that none touches the person's own models or settings."""
    home = next(_homes)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("LOWBIT_CHAT_HOME", str(home))
    return home


@pytest.fixture
def planted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The current folder is somebody else's, with modules of our names and of Python's; PYTHONPATH has another install.

    Returns:
        Tells which of these modules were run: none is to be.
    """
    folder, elsewhere = tmp_path_factory.mktemp("planted"), tmp_path_factory.mktemp("elsewhere")
    marker = folder / "ran.txt"
    for module in (folder / "runtime" / "__init__.py", folder / "argparse.py", folder / "queue.py"):
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"open({str(marker)!r}, 'a').write(__file__ + '\\n')\n")
    (elsewhere / "runtime").mkdir()
    (elsewhere / "runtime" / "__init__.py").write_text((folder / "runtime" / "__init__.py").read_text())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    return lambda: marker.read_text().split() if marker.exists() else []


LARGE = ("test_decoding.py", "test_cpu_decoder.py", "test_budget.py", "test_snapshots.py", "test_real_models.py")
"""Files that take long; they come first, so that workers which share the files out end at about the same time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of benchmarks and reports slow: the program does not depend on them. Large files come first."""
    for item in items:
        if LAB in item.path.parents:
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in LARGE, item.path not in slow))
