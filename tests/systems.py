"""Imports of the whole program as another system has it: `python -m tests.systems win32|darwin`.

While a module of the program is imported, `sys.platform` and `platform.machine()` are that system's, and modules that
only POSIX has cannot be found. Other packages, which know the system they were installed for, see the real one.
"""

from __future__ import annotations

import builtins
import importlib
import platform
import sys
from typing import Any

from tests.architecture import ROOT

ROOMS = ("app", "assets", "models", "runtime", "tuner")
POSIX = frozenset({"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"})
"""Modules that Windows lacks."""
MACHINES = {"win32": "AMD64", "darwin": "arm64"}
"""`platform.machine()` of each system."""


def modules() -> list[str]:
    """Dotted names of everything that is installed."""
    found = []
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[:2] != ("assets", "demo_model"):
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


class System:
    """Another system, for the modules of the program alone."""

    def __init__(self, name: str) -> None:
        self.name, self.machine = name, MACHINES[name]
        self.real = (sys.platform, platform.machine)
        self._import = builtins.__import__

    def enter(self) -> None:
        sys.platform = self.name
        platform.machine = lambda: self.machine

    def leave(self) -> None:
        sys.platform, platform.machine = self.real

    def importing(self, name: str, given: Any = None, *rest: Any) -> Any:
        """Stands in for `__import__`."""
        importer = (given or {}).get("__name__", "")
        own = importer.partition(".")[0] in ROOMS
        if own and name.partition(".")[0] in POSIX:
            raise ModuleNotFoundError(f"{importer} imports {name}, which {self.name} lacks", name=name)
        (self.enter if name.partition(".")[0] in ROOMS else self.leave)()
        try:
            return self._import(name, given, *rest)
        finally:
            (self.enter if own else self.leave)()


def main() -> None:
    """Import everything, and say what cannot be."""
    system = System(sys.argv[1])
    builtins.__import__ = system.importing
    failed = {}
    for module in modules():
        try:
            system.enter()
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
            failed[module] = f"{type(error).__name__}: {error}"
        finally:
            system.leave()
    lines = [f"{module}: {error}" for module, error in failed.items()]
    lines.append(f"{len(modules()) - len(failed)} modules imported as on {sys.argv[1]}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
