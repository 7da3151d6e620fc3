"""The import graph: rooms and layers, upward imports, cycles, parameter lists, and the path of a prompt.

    python -m tests.architecture

Arrows are read from the sources: imports inside functions and those for type checkers alone count too. A *room* is a
folder without folders in it; files that stand beside rooms (`runtime/engine/engine.py`, beside `runtime/kv`) count each
for itself, for some of them are what the rooms stand on (`runtime/errors.py`) and some stand on the rooms.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ("app", "runtime", "tuner", "models", "assets")
ALLOWED: Mapping[str, frozenset[str]] = {
    "app": frozenset({"app", "runtime", "tuner", "models", "assets"}),
    "runtime": frozenset({"runtime", "tuner", "models"}),
    "tuner": frozenset({"tuner"}),
    "models": frozenset({"models"}),
    "assets": frozenset({"assets", "models"}),
}
"""What each top-level room may import."""
_DOTTED = re.compile(r"\w+(\.\w+){2,}")
BACKENDS = "runtime.backends"
BACKEND_ROOMS = ("reference", "cpu", "triton")
Graph = Mapping[str, frozenset[str]]


def sources() -> dict[str, Path]:
    """Every module of the house, by its dotted name."""
    found = {}
    for room in HOUSE:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str) -> Iterator[str]:
    """Dotted names that a module imports, wherever it does; of `from a import b`, `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(modules: Mapping[str, Path]) -> Graph:
    """Which modules of the house each module imports. A package that is only passed on the way does not count."""
    graph = {}
    for name, path in modules.items():
        named = {found for found in imports(path.read_text(encoding="utf-8")) if found in modules} - {name}
        deeper = {other.rsplit(".", 1)[0] for other in named}
        initial = {found for found in named if found in deeper and modules[found].name == "__init__.py"}
        graph[name] = frozenset(named - initial)
    return graph


def room_of(module: str, modules: Mapping[str, Path]) -> str:
    """The room that a module stands in: its folder, or itself where that has rooms in it."""
    folder = modules[module].parent
    has_rooms = any((inner / "__init__.py").exists() for inner in folder.iterdir())
    return module if has_rooms else ".".join(folder.relative_to(ROOT).parts)


def between_rooms(graph: Graph, modules: Mapping[str, Path]) -> Graph:
    """The arrows between rooms."""
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        own = room_of(module, modules)
        rooms.setdefault(own, set()).update({room_of(other, modules) for other in imported} - {own})
    return {room: frozenset(others) for room, others in rooms.items()}


def runtime_rooms(graph: Graph) -> Graph:
    """The arrows between the rooms of `runtime`: its folders and its loose modules.

    Each backend is a room of its own; what is left of `runtime.backends` is their contract.
    """
    rooms: dict[str, set[str]] = {}
    for module in filter(_in_runtime, graph):
        own = _runtime_room(module)
        rooms.setdefault(own, set()).update({_runtime_room(o) for o in graph[module] if _in_runtime(o)} - {own})
    return {room: frozenset(others) for room, others in rooms.items()}


def _in_runtime(module: str) -> bool:
    return module.startswith("runtime.")


def _runtime_room(module: str) -> str:
    backend = _backend(module)
    return f"{BACKENDS}.{backend}" if backend else ".".join(module.split(".")[:2])


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of two nodes or more)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def floors(graph: Graph) -> dict[str, int]:
    """How high each node stands: 1 where it imports nothing, else one above the highest that it imports."""
    heights: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in heights:
            heights[node] = 0  # a cycle ends here
            heights[node] = 1 + max((height(other) for other in graph[node]), default=0)
        return heights[node]

    for node in graph:
        height(node)
    return heights


def upward(graph: Graph) -> list[str]:
    """Arrows that go up: into a top-level room that may not be imported, or into a backend from outside it."""
    found = []
    for module, imported in graph.items():
        for other in imported:
            into, own = _backend(other), _backend(module)
            if other.split(".")[0] not in ALLOWED[module.split(".")[0]] or (into is not None and into != own):
                found.append(f"{module} -> {other}")
    return sorted(found)


def _backend(module: str) -> str | None:
    """The backend that a module belongs to; None where it belongs to none."""
    parts = module.removeprefix(f"{BACKENDS}.").split(".")
    return parts[0] if module.startswith(f"{BACKENDS}.") and parts[0] in BACKEND_ROOMS else None


def parameters(modules: Mapping[str, Path]) -> list[tuple[int, str]]:
    """How many parameters every function has, most first; `self` and `cls` do not count."""
    found = []
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found.append((sum(one.arg not in ("self", "cls") for one in given), f"{name}.{node.name}"))
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A row of the table in docs/architecture.md that tells how a prompt flows."""

    file: str
    """Where it is."""
    entry: str
    """The function that the prompt enters there, as `name` or `Class.name`."""
    beside: tuple[str, ...]
    """Other files that the row names."""


def way(page: str) -> list[Stop]:
    """The stops of a prompt.

    Args:
        page: docs/architecture.md.
    """
    section = page.split("## How a prompt flows")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        Stop(file=file.strip("| `"), entry=entry.strip("`"), beside=tuple(paths(rest))) for file, entry, rest in rows
    ]


def paths(text: str) -> list[str]:
    """The files and folders of the house that a text names in full."""
    return re.findall(rf"`((?:{'|'.join(HOUSE)}|tests)/[\w/.]+)`", text)


def gaps(stops: Sequence[Stop], sources: Mapping[str, str], graph: Graph) -> list[str]:
    """Where the way of a prompt is broken.

    A stop has to define its entry, and to call, pass on or request the entry of the next. Files that a row names have
    to import each other, so that they hang together with the row's own.
    """
    trees = {file: ast.parse(source) for file, source in sources.items()}
    found = [f"{stop.file} has no {stop.entry}" for stop in stops if stop.entry not in _defined(trees[stop.file])]
    for stop, following in itertools.pairwise(stops):
        if not _used(trees[stop.file]) & _reached_by(following, trees[following.file]):
            found.append(f"{stop.file} does not call {following.entry} of {following.file}")
    for stop in stops:
        joined, left = {stop.file}, set(stop.beside) - {stop.file}
        while near := {other for other in left if any(_imports(graph, one, other) for one in joined)}:
            joined |= near
            left -= near
        found += [f"{stop.file} and {other} do not import each other" for other in sorted(left)]
    return found


def _defined(tree: ast.Module) -> set[str]:
    """Functions and classes' methods of a module, and its constants, by name."""
    names = {f"{one.name}.{own.name}" for one in tree.body if isinstance(one, ast.ClassDef) for own in _functions(one)}
    assigned = {
        t.id for one in tree.body if isinstance(one, ast.Assign) for t in one.targets if isinstance(t, ast.Name)
    }
    return names | {one.name for one in _functions(tree)} | assigned


def _functions(inside: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [one for one in inside.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]


def _used(tree: ast.Module) -> set[str]:
    """Names that a module calls, passes on or lists, without leading underscores, and the URL paths that it has.

    Something that is found by its dotted name, `room.module.name`, is passed on as a string.
    """
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            used |= {_last(one) for one in (node.func, *node.args, *(word.value for word in node.keywords))}
            told = (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
            used |= {name.rpartition(".")[2] for name in told if _DOTTED.fullmatch(name)}
        elif isinstance(node, ast.Dict):
            used |= set(map(_last, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/"):
            used.add(node.value)
    return used


def _last(node: ast.expr) -> str:
    """`step` of `self._engine.step`, of `self._step` and of `step`; empty of anything else."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def _reached_by(stop: Stop, tree: ast.Module) -> set[str]:
    """What reaches a stop: the name of its entry, or the URL path under which that is routed."""
    name = stop.entry.rsplit(".", 1)[-1]
    routes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name in map(_last, node.args)]
    told = {one.value for route in routes for one in route.args if isinstance(one, ast.Constant)}
    return {name, *(path for path in told if isinstance(path, str) and path.startswith("/"))}


def _imports(graph: Graph, one: str, other: str) -> bool:
    """Whether one of two files imports the other."""
    a, b = (file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in (one, other))
    return b in graph.get(a, ()) or a in graph.get(b, ())


def main() -> None:
    """Print what there is."""
    modules = sources()
    graph = arrows(modules)
    rooms = between_rooms(graph, modules)
    heights = floors(rooms)
    for stories in (heights, floors(runtime_rooms(graph))):
        for floor in range(max(stories.values()), 0, -1):
            print(f"floor {floor:2}  {', '.join(sorted(room for room, height in stories.items() if height == floor))}")
        print()
    loops = cycles(graph) + cycles(rooms)
    print(f"modules {len(modules)}, rooms {len(rooms)}, floors {max(heights.values())}")
    print(f"arrows {sum(map(len, graph.values()))}, between rooms {sum(map(len, rooms.values()))}")
    print(f"upward arrows {len(upward(graph))}", *upward(graph), sep="\n  ")
    print(f"cycles {len(loops)}", *(" <-> ".join(loop) for loop in loops), sep="\n  ")
    print("longest parameter lists", *(f"{count:3} {name}" for count, name in parameters(modules)[:10]), sep="\n  ")


if __name__ == "__main__":
    main()
