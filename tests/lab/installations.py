"""What an installation downloads, on each system: resolved by uv with wheels alone.

    python -m tests.lab.installations

Nothing is downloaded but the index's pages; the sizes of wheels are theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lab.store import ROOT, about_run, parser, write
from tests.lab.store import table as markdown_table

PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux aarch64": "aarch64-manylinux_2_31",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
"""uv's names of the systems. llguidance's wheels need glibc 2.31, torch's macOS 14."""
PYTHON = "3.13"
SMALL = ROOT / "requirements-cpu.txt"
WHOLE = ROOT / "pyproject.toml"


def resolve(requirements: Path, platform: str, python: str) -> dict[str, int]:
    """Bytes of every package's wheel.

    Args:
        requirements: pyproject.toml, or a file of requirements.
        platform: uv's name of the system.
        python: Version of Python, `3.13`.

    Raises:
        subprocess.CalledProcessError: some package has no wheel there, or there is no index.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", str(requirements), "-o", str(lock)]
        command += ["--format", "pylock.toml", "--only-binary", ":all:", "--no-header"]
        command += ["--python-platform", platform, "--python-version", python]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUAL_ENV")}
        subprocess.run(
            command, check=True, capture_output=True, text=True, env={**clean, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
        )
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return {package["name"]: min(int(wheel["size"]) for wheel in package["wheels"]) for package in packages}


def table(found: Mapping[str, Any]) -> str:
    """Megabytes by system and installation."""
    rows = [(row["system"], *(f"{row[name] / 1e6:,.0f} MB" for name in ("whole", "small"))) for row in found["rows"]]
    return markdown_table(("downloads", "everything", "processors only"), rows)


def main() -> None:
    """Resolve, print and store."""
    given = parser(__doc__, "installations").parse_args()
    rows = []
    for system, platform in PLATFORMS.items():
        sizes = {
            name: sum(resolve(file, platform, PYTHON).values()) for name, file in (("whole", WHOLE), ("small", SMALL))
        }
        rows.append({"system": system, **sizes})
    found = {**about_run("python -m tests.lab.installations", ("pyproject.toml",)), "python": PYTHON, "rows": rows}
    print(table(found))
    write(given.out, found)


if __name__ == "__main__":
    main()
