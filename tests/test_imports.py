"""Imports go one way, without cycles; start-up paths load nothing heavy; pages only name existing files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.system.child import ROOMS
from tests.architecture import (
    HOUSE,
    ROOT,
    Graph,
    arrows,
    between_rooms,
    cycles,
    floors,
    gaps,
    imports,
    parameters,
    paths,
    runtime_rooms,
    sources,
    upward,
    way,
)

LONGEST = {"runtime.backends.cpu": 8, "app.cli": 30, "": 12}
"""Most parameters of a function, by where it stands: on the command line, those of a command with its options."""


LOOSE = 3
"""Modules of `runtime` that stand in no folder, at most."""
FLOORS = 7
"""Floors of `runtime`, at most."""


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    return sources()


@pytest.fixture(scope="module")
def graph(modules: dict[str, Path]) -> Graph:
    return arrows(modules)


def test_no_arrow_goes_up(graph: Graph) -> None:
    assert upward(graph) == []


def test_no_import_runs_in_a_circle(graph: Graph, modules: dict[str, Path]) -> None:
    assert cycles(graph) == []
    assert cycles(between_rooms(graph, modules)) == []


def test_the_runtime_stays_low(graph: Graph) -> None:
    rooms = runtime_rooms(graph)
    loose = {path.stem for path in (ROOT / "runtime").glob("*.py")} - {"__init__"}
    assert len(loose) <= LOOSE
    assert {f"runtime.{name}" for name in loose} <= set(rooms)
    assert cycles(rooms) == []
    assert max(floors(rooms).values()) <= FLOORS


def test_parameter_lists_are_short(modules: dict[str, Path]) -> None:
    limits = (
        (count, name, next(LONGEST[room] for room in LONGEST if name.startswith(room)))
        for count, name in parameters(modules)
    )
    assert [name for count, name, limit in limits if count > limit] == []


def test_child_processes_take_every_room_from_here() -> None:
    assert set(ROOMS) == set(HOUSE)


def test_each_stop_of_a_prompt_calls_the_next(graph: Graph) -> None:
    stops = way((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert 8 < len(stops) < 20
    files = {file for stop in stops for file in (stop.file, *stop.beside)}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    assert gaps(stops, texts, graph) == []


def test_a_broken_way_of_a_prompt_is_seen() -> None:
    page = (
        "## How a prompt flows\n\n| `app/a.py` | `A.send` | asks `app/c.py` |\n"
        "| `app/b.py` | `B.answer` | |\n| `app/d.py` | `run` | |\n\n## Other ways\n\n| `app/no.py` | `no` | |\n"
    )
    texts = {
        "app/a.py": "class A:\n    def send(self): self.post('/v1/chat')",
        "app/b.py": "class B:\n    def answer(self): self._run()\n    def routes(self): return [('/v1/chat')]",
        "app/c.py": "",
        "app/d.py": "def run(): ...",
    }
    texts["app/b.py"] = texts["app/b.py"].replace("[('/v1/chat')]", "[route('/v1/chat', self.answer)]")
    graph = {"app.a": frozenset({"app.c"}), "app.c": frozenset[str]()}
    stops = way(page)
    assert [stop.file for stop in stops] == ["app/a.py", "app/b.py", "app/d.py"]
    assert gaps(stops, texts, graph) == []
    assert len(gaps(stops, {**texts, "app/a.py": texts["app/a.py"].replace("chat", "models")}, graph)) == 1
    assert len(gaps(stops, {**texts, "app/b.py": texts["app/b.py"].replace("_run", "_ask")}, graph)) == 1
    assert len(gaps(stops, {**texts, "app/d.py": "def runs(): ..."}, graph)) == 1
    assert gaps(stops, texts, {}) == ["app/a.py and app/c.py do not import each other"]


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    words = (re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()) for line in lines)
    return {word.replace(" ", "-") for word in words}


PAGES = sorted(["README.md", "CHANGELOG.md", *(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))])

FILES = [str(file) for room in (*ROOMS, "tests") for file in (ROOT / room).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    short = set(re.findall(r"[`(\s]([\w/]+\.py)\b", text))  # such as `machine/unit.py` on the page of a room
    missing = {name for name in short if not any(file.endswith(f"/{name}") for file in FILES)}
    assert sorted(missing | {file for file in paths(text) if not (ROOT / file).exists()}) == []


def test_the_rules_see_what_breaks_them() -> None:
    inside = "def f():\n    from runtime.engine.engine import Engine\n"
    source = f"{inside}if TYPE_CHECKING:\n    import app.cli\n"
    assert set(imports(source)) == {"runtime.engine.engine", "runtime.engine.engine.Engine", "app.cli"}
    graph = {
        "runtime.engine.engine": frozenset({"runtime.backends.cpu.decoder"}),
        "runtime.backends.cpu.decoder": frozenset({"runtime.backends.cpu.pool", "app.cli"}),
        "runtime.backends.cpu.pool": frozenset({"runtime.backends.triton.gpu"}),
        "runtime.backends.triton.gpu": frozenset({"runtime.backends.cpu.decoder"}),
        "app.cli": frozenset[str](),
    }
    assert len(upward(graph)) == 4
    assert cycles(graph) == [sorted(set(graph) - {"runtime.engine.engine", "app.cli"})]
    assert floors({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset()}) == {"a": 3, "b": 2, "c": 1}
    assert runtime_rooms(graph) == {
        "runtime.engine": frozenset({"runtime.backends.cpu"}),
        "runtime.backends.cpu": frozenset({"runtime.backends.triton"}),
        "runtime.backends.triton": frozenset({"runtime.backends.cpu"}),
    }


@pytest.mark.parametrize(
    "module",
    [
        "app.tui",
        "app.cli.main",
        "app.client",
        "app.supervisor",
        "app.settings",
        "models.store",
        "runtime.backends.cpu.decoder",
        "runtime.server.lock",
    ],
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
