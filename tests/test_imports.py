"""Rooms import one way, in no circle, and those that a person waits for stay free of heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import (
    ROOT,
    arrows,
    between_rooms,
    cycles,
    floors,
    imports,
    parameters,
    sources,
    upward,
)

LONGEST = {"runtime.backends.cpu": 8, "runtime.backends.triton": 12, "": 21}
"""Most parameters of a function, by where it stands: the last are those of a command with its options."""


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    return sources()


def test_no_arrow_goes_up(modules: dict[str, Path]) -> None:
    assert upward(arrows(modules)) == []


def test_no_import_runs_in_a_circle(modules: dict[str, Path]) -> None:
    graph = arrows(modules)
    assert cycles(graph) == []
    assert cycles(between_rooms(graph, modules)) == []


def test_parameter_lists_are_short(modules: dict[str, Path]) -> None:
    limits = (
        (count, name, next(LONGEST[room] for room in LONGEST if name.startswith(room)))
        for count, name in parameters(modules)
    )
    assert [name for count, name, limit in limits if count > limit] == []


def test_the_readme_s_way_of_a_prompt_can_be_read() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8")
    way = words[words.index("## How a prompt flows") : words.index("## More")]
    files = [line.split("`")[1] for line in way.splitlines() if line.startswith("|") and "`" in line]
    assert 5 < len(files) <= 10
    lengths = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    assert {file: length for file, length in lengths.items() if length >= 300} == {}


def test_the_rules_see_what_breaks_them() -> None:
    inside = "def f():\n    from runtime.engine import Engine\n"
    source = f"{inside}if TYPE_CHECKING:\n    import app.cli\nelse:\n    import tuner"
    assert set(imports(source)) == {"runtime.engine", "runtime.engine.Engine", "tuner"}
    graph = {
        "runtime.engine": frozenset({"runtime.backends.cpu.decoder"}),
        "runtime.backends.cpu.decoder": frozenset({"runtime.backends.cpu.pool", "app.cli"}),
        "runtime.backends.cpu.pool": frozenset({"runtime.backends.triton.card"}),
        "runtime.backends.triton.card": frozenset({"runtime.backends.cpu.decoder"}),
        "app.cli": frozenset[str](),
    }
    assert len(upward(graph)) == 4
    assert cycles(graph) == [sorted(set(graph) - {"runtime.engine", "app.cli"})]
    assert floors({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset()}) == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize(
    "module",
    ["app.tui", "app.cli.main", "app.client", "app.supervisor", "app.settings", "models.store", "runtime.lock"],
)
def test_light_modules_do_not_load_heavy_libraries(module: str) -> None:
    heavy = ("torch", "transformers", "numba", "huggingface_hub")
    code = f"import sys, {module}; print(*(name for name in {heavy!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    "module",
    [
        "app.tui.app",
        "app.client",
        "runtime.compensation",
        "runtime.wire.answers",
        "runtime.wire.device",
        "runtime.wire.requests",
    ],
)
def test_what_the_ui_imports_loads_nothing_slow(module: str) -> None:
    slow = ("torch", "transformers", "numba", "numpy", "pydantic", "httpx", "starlette")
    code = f"import sys, {module}; print(*(name for name in {slow!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
