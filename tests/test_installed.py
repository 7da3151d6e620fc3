"""The installed program: the wheel is built as pipx and uv build it, installed, and run elsewhere.

No network: the build takes the setuptools of this environment, and the new environment borrows its other packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
ROOMS = {"app", "assets", "models", "runtime", "tuner"}


def command(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that must succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files as a clone has them: nothing that was built or compiled here."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"the files of a clone are told by git, which says: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(("docs/", "tests/")) and (ROOT / name).is_file():  # those are large, and not built
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    (folder / "tests").mkdir()  # setuptools would take this one along
    shutil.copyfile(Path(__file__), folder / "tests" / "test_imports.py")
    return folder


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=clone)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command(sys.executable, "-c", BUILD, "build_wheel", folder, cwd=clone)
    (archive,) = folder.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands in an environment into which the wheel was installed."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    borrowed = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    (packages,) = (home / "lib").glob("python*/site-packages")
    # Only their packages: what is installed there in editable form, this repository above all, is not followed.
    (packages / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    command(*pip, "--no-index", "--no-deps", "--no-compile", "--force-reinstall", wheel, cwd=home)
    return home / "bin"


def names(wheel: Path) -> set[str]:
    """Files of a wheel, without those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_program_and_its_assets_alone(wheel: Path) -> None:
    found = names(wheel)
    expected = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.suffix != ".po" and not {"__pycache__", "demo_model"} & {*path.parts}
    }
    assert found == expected
    assert {"app/tui/chat.tcss", "assets/text/calibration.md", "assets/demo/packed/manifest.json"} < found


def test_the_sdist_holds_what_it_takes_to_build(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {path.name for path in source.iterdir() if path.is_dir()} - {"lowbit_chat.egg-info"} == ROOMS
    assert not (source / "assets" / "demo_model").exists()
    command(sys.executable, "-c", BUILD, "build_wheel", tmp_path, cwd=source)
    (again,) = tmp_path.glob("*.whl")
    assert names(again) == names(wheel)


def test_help_and_version(scripts: Path, tmp_path: Path) -> None:
    assert command(scripts / "lowbit-chat", "--help", cwd=tmp_path).stdout.startswith("Usage: lowbit-chat")
    assert command(scripts / "tune-device", "--help", cwd=tmp_path).stdout.startswith("Usage: lowbit-chat tune-device")
    assert command(scripts / "lowbit-chat", "--version", cwd=tmp_path).stdout.startswith("lowbit-chat ")


def test_it_runs_what_was_installed_not_what_stands_here(scripts: Path, tmp_path: Path) -> None:
    code = f"import {', '.join(sorted(ROOMS))}; print({', '.join(f'{room}.__file__' for room in sorted(ROOMS))})"
    places = command(scripts / "python", "-c", code, cwd=tmp_path).stdout.split()
    assert all(Path(place).is_relative_to(scripts.parent) for place in places), places


def test_doctor_answers(scripts: Path, tmp_path: Path) -> None:
    said = json.loads(command(scripts / "lowbit-chat", "doctor", "--json", cwd=tmp_path).stdout)
    assert {"backend", "reason", "problems"} <= set(said)


def test_the_bundled_model_answers(scripts: Path, tmp_path: Path) -> None:
    # The kernels of the other backends would be compiled anew for a new place, which takes a minute.
    run = (scripts / "lowbit-chat", "run", "demo", "hello", "--backend", "reference", "--temperature", "0", "--json")
    said = json.loads(command(*run, cwd=tmp_path).stdout)
    assert said["finish_reason"] == "stop"
    assert said["text"].strip()
