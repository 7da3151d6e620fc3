from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from runtime import program_version
from runtime.server.lock import LockRecord, is_alive, lock_path, read_lock, remove_lock, write_lock
from runtime.system.lifetimes import process_create_time

RECORD = LockRecord(pid=1234, create_time=1700000000.25, host="127.0.0.1", port=4321, token="secret", version="1.0")


def test_what_is_written_is_read_back_and_only_the_owner_can(tmp_path: Path) -> None:
    path = lock_path(tmp_path)
    assert path == tmp_path / "runtime.json"
    assert read_lock(path) is None
    for record in (RECORD, replace(RECORD, port=1)):  # the second replaces the first
        write_lock(path, record)
        assert read_lock(path) == record
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [file.name for file in tmp_path.iterdir()] == ["runtime.json"]
    assert set(json.loads(path.read_text())) == {"pid", "create_time", "host", "port", "token", "version"}
    with pytest.raises(OSError, match="No such file"):
        write_lock(tmp_path / "absent" / "runtime.json", RECORD)


def test_where_files_cannot_be_closed_to_others_none_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk without permissions; nobody would believe it."""
    make = tempfile.mkstemp

    def open_to_all(**options: Any) -> tuple[int, str]:
        descriptor, name = make(**options)
        os.fchmod(descriptor, 0o777)
        return descriptor, name

    monkeypatch.setattr(tempfile, "mkstemp", open_to_all)
    with pytest.raises(PermissionError, match="set LOWBIT_CHAT_HOME to a folder on another disk"):
        write_lock(lock_path(tmp_path), RECORD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({**asdict(RECORD), "more": 1}),
        json.dumps({k: v for k, v in asdict(RECORD).items() if k != "token"}),
        json.dumps({**asdict(RECORD), "pid": "1234"}),
        json.dumps({**asdict(RECORD), "pid": True}),
        json.dumps({**asdict(RECORD), "pid": -1}),
        json.dumps({**asdict(RECORD), "port": 70000}),
        json.dumps({**asdict(RECORD), "token": ""}),
        json.dumps({**asdict(RECORD), "create_time": None}),
        json.dumps({**asdict(RECORD), "create_time": 10**400}),
        json.dumps({**asdict(RECORD), "create_time": float("nan")}),
        json.dumps({**asdict(RECORD), "pid": 10**30}),
        json.dumps({**asdict(RECORD), "token": "a\nb"}),
        json.dumps({**asdict(RECORD), "version": "\x1b[2J"}),
        json.dumps({**asdict(RECORD), "version": "x" * 10**6}),
        json.dumps(asdict(RECORD)).replace("1234", "9" * 5000),
        '{"pid":' + "[" * 100_000,
        "\ud800".encode("utf-16", "surrogatepass").decode("latin-1"),
        *(
            json.dumps({**asdict(RECORD), "host": host})
            for host in ("203.0.113.5", "0.0.0.0", "example.org", "::1%]@203.0.113.5:80/#")
        ),
    ],
    ids=lambda content: content[:60],
)
def test_what_is_no_lock_file_counts_as_none(tmp_path: Path, content: str) -> None:
    """One that leads away from this machine is none either: it would be sent a token and chats."""
    path = lock_path(tmp_path)
    path.write_text(content)
    path.chmod(0o600)
    assert read_lock(path) is None


@pytest.mark.parametrize("case", ["readable", "writable", "link", "foreign"])
def test_what_another_user_may_have_written_counts_as_none(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lock_path(tmp_path)
    write_lock(path, RECORD)
    if case == "link":
        path.rename(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    elif case == "foreign":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    else:
        path.chmod(0o640 if case == "readable" else 0o602)
    assert read_lock(path) is None


def test_only_the_own_file_is_removed(tmp_path: Path) -> None:
    path = lock_path(tmp_path)
    write_lock(path, RECORD)
    remove_lock(path, replace(RECORD, token="another's"))
    assert path.exists()
    remove_lock(path, RECORD)
    assert not path.exists()
    remove_lock(path, RECORD)


def test_a_process_is_known_by_id_and_creation_time() -> None:
    created = process_create_time(os.getpid())
    assert created is not None
    own = replace(RECORD, pid=os.getpid(), create_time=created)
    assert is_alive(own)
    assert is_alive(LockRecord(**json.loads(json.dumps(asdict(own)))))
    assert not is_alive(replace(own, create_time=created - 10))


def test_an_ended_process_is_not_alive_even_before_it_is_cleared_away() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    created = process_create_time(child.pid)
    assert created is not None
    record = replace(RECORD, pid=child.pid, create_time=created)
    assert is_alive(record)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still listed
    assert not is_alive(record)
    child.wait()
    child.stdin.close()
    assert not is_alive(record)


def test_a_record_tells_its_address_and_not_its_token() -> None:
    assert RECORD.base_url == "http://127.0.0.1:4321"
    assert replace(RECORD, host="::1").base_url == "http://[::1]:4321"
    assert "secret" not in repr(RECORD)
    assert program_version()
