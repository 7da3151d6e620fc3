"""What imports what: rooms and their floors, arrows that go up, cycles, and the longest parameter lists.

    python -m tests.architecture

Arrows are read from the sources, imports inside functions too; those for type checkers alone are left out. A *room* is
a folder without folders in it; files that stand beside rooms (`runtime/engine.py`, beside `runtime/kv`) count each for
itself, for some of them are what the rooms stand on (`runtime/errors.py`) and some stand on the rooms.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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
BACKENDS = "runtime.backends"
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
    """Dotted names that a module imports, at the top or inside a function; of `from a import b`, `a` and `a.b`."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


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
    return parts[0] if module.startswith(f"{BACKENDS}.") else None


def parameters(modules: Mapping[str, Path]) -> list[tuple[int, str]]:
    """How many parameters every function has, most first; `self` and `cls` do not count."""
    found = []
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found.append((sum(one.arg not in ("self", "cls") for one in given), f"{name}.{node.name}"))
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))


def main() -> None:
    """Print what there is."""
    modules = sources()
    graph = arrows(modules)
    rooms = between_rooms(graph, modules)
    heights = floors(rooms)
    for floor in range(max(heights.values()), 0, -1):
        print(f"floor {floor:2}  {', '.join(sorted(room for room, height in heights.items() if height == floor))}")
    loops = cycles(graph) + cycles(rooms)
    print(f"\nmodules {len(modules)}, rooms {len(rooms)}, floors {max(heights.values())}")
    print(f"arrows {sum(map(len, graph.values()))}, between rooms {sum(map(len, rooms.values()))}")
    print(f"upward arrows {len(upward(graph))}", *upward(graph), sep="\n  ")
    print(f"cycles {len(loops)}", *(" <-> ".join(loop) for loop in loops), sep="\n  ")
    print("longest parameter lists", *(f"{count:3} {name}" for count, name in parameters(modules)[:10]), sep="\n  ")


if __name__ == "__main__":
    main()
