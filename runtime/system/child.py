"""The start of this program's own modules as child processes: with the packages of the parent, from any folder.

`python -m` looks for every module in the current folder first. In a folder that somebody else filled, an `argparse.py`
of theirs would run in the child, and a `runtime` of theirs in the place of this one. So this file is run instead, with
`-P`, which leaves the current folder out. It takes the program's packages from where it lies itself, whatever else is
installed, and everything else from where Python has it.
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
    """What starts a module of this program as `python -m` would.

    Args:
        module: Its dotted name.
        arguments: What it finds in `sys.argv`.
    """
    return [sys.executable, "-P", str(_FILE), module, *arguments]


class _OwnPackages(PathFinder):
    """Finds the program's packages beside this one's folder, and no others."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG003  # of packages inside others, which are found without this
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        return super().find_spec(fullname, [str(_FILE.parents[2])], target) if fullname in ROOMS else None


def _run() -> None:
    """Be the child."""
    from runpy import run_module

    sys.meta_path.insert(0, _OwnPackages)
    os.environ["PYTHONSAFEPATH"] = "1"  # whatever Python the child starts leaves the current folder out, too
    del sys.argv[0]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
