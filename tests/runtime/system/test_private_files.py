"""Files and folders that another user of the machine may have written are not trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.system.private_files import ANY_ACCESS, is_private, kernel_folder, private_code_folder, read_private


@pytest.fixture
def somebody_else(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process another user's."""
    other = os.geteuid() + 1
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: other)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder of this user alone."""
    (tmp_path / "closed").mkdir(mode=0o700)
    return tmp_path / "closed"


def refuses(file: Path, denied: int | None = None) -> bool:
    with pytest.raises(OSError):
        read_private(file) if denied is None else read_private(file, denied)
    return True


@pytest.mark.parametrize(
    ("mode", "denied", "trusted"),
    [
        (0o600, ANY_ACCESS, True),
        (0o644, ANY_ACCESS, False),
        (0o644, None, True),
        (0o664, None, False),
        (0o606, None, False),
    ],
)
def test_a_file_is_read_by_its_permissions(tmp_path: Path, mode: int, denied: int | None, trusted: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"code")
    file.chmod(mode)
    assert is_private(file) == (mode in (0o600, 0o644))
    assert read_private(file, *(() if denied is None else (denied,))) == b"code" if trusted else refuses(file, denied)


def test_only_own_files_are_read(tmp_path: Path, somebody_else: Callable[[], None]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"code")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe)
    for odd in (link, pipe, tmp_path, tmp_path / "absent"):
        assert not is_private(odd)
        with pytest.raises(OSError):
            read_private(odd)
    assert is_private(file)
    somebody_else()
    assert not is_private(file)
    with pytest.raises(PermissionError, match="belongs to another user"):
        read_private(file)


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CHAT_KERNEL_CACHE", str(tmp_path / "a" / "b"))
    assert kernel_folder("triton") == tmp_path / "a" / "b" / "triton" == kernel_folder("triton")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", kernel_folder("triton"))] == [0o700, 0o700]


OPEN: dict[str, Callable[[Path], Path]] = {
    "for-all": lambda closed: made(closed / "code", 0o777),
    "for-a-group": lambda closed: made(closed / "code", 0o775),
    "replaceable": lambda closed: made(made(closed / "open", 0o777) / "code", 0o700),
    "behind-a-link": lambda closed: (
        linked(made(closed / "open", 0o777) / "link", made(closed / "code", 0o700)) / "code"
    ),
    "a-file": lambda closed: linked(closed / "code", Path("/dev/null")),
}


def made(folder: Path, mode: int) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    return folder


def linked(link: Path, folder: Path) -> Path:
    """A link to a folder, or to the one that it lies in."""
    link.symlink_to(folder if folder.name == "null" else folder.parent)
    return link


@pytest.mark.parametrize("case", [*OPEN, "foreign"])
def test_a_folder_that_others_may_write_to_is_not_used(
    case: str, closed: Path, somebody_else: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = OPEN[case](closed) if case in OPEN else made(closed / "code", 0o700)
    if case == "foreign":
        somebody_else()
    found = private_code_folder(folder)
    assert found != folder
    assert stat.S_IMODE(found.stat().st_mode) == stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    (said,) = caplog.messages
    assert str(folder) in said
    assert "LOWBIT_CHAT_KERNEL_CACHE names another folder" in said


def test_folders_above_may_be_shared_where_nobody_can_take_this_one_away(closed: Path) -> None:
    shared = made(closed / "shared", 0o1777)
    group = made(shared / "group", 0o775)
    assert private_code_folder(group / "code") == group / "code"


def test_where_files_have_no_such_owners_nothing_is_checked(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(closed / "code", 0o777)
    (folder / "file").write_bytes(b"code")
    (folder / "file").chmod(0o666)
    monkeypatch.delattr(os, "geteuid")
    assert private_code_folder(folder) == folder
    assert read_private(folder / "file") == b"code"
