"""Child processes of this program: runs its own modules with the parent's packages, from any folder.

`python -m` searches the current folder first. In a folder with somebody else's files, an `argparse.py` there would run
in the child, or a `runtime` there would replace this one. So this file is run instead, with `-P`, which excludes the
current folder. It imports the program's packages from its own location, whatever else is installed, and everything else
from Python's usual path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOMS = ("app", "assets", "models", "runtime", "tuner")
"""The program's packages."""
_FILE = Path(__file__).absolute()


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this program, like `python -m`."""
    return [sys.executable, "-P", str(_FILE), module, *arguments]


class _OwnPackages(PathFinder):
    """Finds the program's packages next to this one's folder, and no others."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG003  # of packages inside others, which are found without this
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        return super().find_spec(fullname, [str(_FILE.parents[2])], target) if fullname in ROOMS else None


def _run() -> None:
    from runpy import run_module

    sys.meta_path.insert(0, _OwnPackages)
    os.environ["PYTHONSAFEPATH"] = "1"  # Python processes started by the child exclude the current folder as well
    del sys.argv[0]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
