"""The four rooms import one way, and the rooms that a person waits for stay free of heavy libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("app", "runtime", "tuner", "models", "assets")
ALLOWED = {
    "app": {"app", "runtime", "tuner", "models", "assets"},
    "runtime": {"runtime", "tuner", "models"},
    "tuner": {"tuner"},
    "models": {"models"},
    "assets": {"assets", "models"},
}


def imported_rooms(source: str) -> set[str]:
    """Rooms that a module imports, at the top or inside a function."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            rooms.add(node.module.split(".")[0])
    return rooms & {*ROOMS, "tests"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way(room: str) -> None:
    broken = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in sorted((ROOT / room).rglob("*.py"))
        if (found := imported_rooms(path.read_text(encoding="utf-8")) - ALLOWED[room])
    }
    assert not broken


def test_the_rule_sees_an_import_inside_a_function() -> None:
    assert imported_rooms("def f():\n    from runtime.engine import Engine\n    import app.cli") == {"runtime", "app"}


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
    ["app.tui.app", "app.client", "runtime.wire.answers", "runtime.wire.device", "runtime.wire.requests"],
)
def test_what_the_ui_imports_loads_nothing_slow(module: str) -> None:
    slow = ("torch", "transformers", "numba", "numpy", "pydantic", "httpx", "starlette")
    code = f"import sys, {module}; print(*(name for name in {slow!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
