from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.errors import ConnectionLostError, StartError
from app.protocol import ChatOptions
from app.supervisor import OLD_LOG_NAME, Supervisor, own_command
from runtime.server.lock import is_alive, lock_path, read_lock, write_lock

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "runtime" / "server" / "fake_runtime.py")]
UI = """
import asyncio, sys
from pathlib import Path
from app.supervisor import OLD_LOG_NAME, Supervisor

async def main():
    supervisor = Supervisor(Path(sys.argv[1]), command=sys.argv[2:])
    client = await supervisor.ensure()
    print((await client.status()).pid, supervisor.attached, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await supervisor.close()

asyncio.run(main())
"""


Supervise = Callable[..., Supervisor]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
async def supervise(home: Path) -> AsyncIterator[Callable[..., Supervisor]]:
    """Makes supervisors of one home; all are closed at the end."""
    made: list[Supervisor] = []

    def make(command: list[str] | None = None, **options: object) -> Supervisor:
        made.append(Supervisor(home, command=command or COMMAND, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for supervisor in made:
        await supervisor.close()


def damage(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def wait_until(predicate: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_start_that_is_cancelled_leaves_no_process(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def slowly(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        time.sleep(0.2)
        begun.append(popen(*arguments, **options))
        return begun[-1]

    supervisor = supervise()
    monkeypatch.setattr(subprocess, "Popen", slowly)
    starting = asyncio.create_task(supervisor.ensure())
    await asyncio.sleep(0.1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await supervisor.close()
    assert [process.poll() is None for process in begun] in ([], [False])


async def test_start_and_close_leave_nothing_running(supervise: Supervise, home: Path) -> None:
    supervisor = supervise()
    client = await supervisor.ensure()
    status = await client.status()
    assert status.state == "empty"
    assert not supervisor.attached
    assert await supervisor.ensure() is client
    assert [mode(home), mode(supervisor.log_file)] == [0o700, 0o600]
    again = (await (await supervisor.restart()).status()).pid
    assert again != status.pid
    assert ended(status.pid)
    await supervisor.close()
    await supervisor.close()
    assert ended(again)
    assert not lock_path(home).exists()


async def test_a_second_one_attaches_and_starts_its_own_when_the_first_is_gone(supervise: Supervise) -> None:
    first, second, third = supervise(), supervise(["nothing-that-could-be-started"]), supervise()
    one, two = await first.ensure(), await second.ensure()
    assert second.attached
    pid = (await one.status()).pid
    assert (await two.status()).pid == pid
    await second.close()
    assert (await one.status()).state == "empty", "it is not ended by whoever attached"
    await third.ensure()
    assert third.crash_report() is None
    await first.close()
    assert third.crash_report() == "the runtime, which another program started, has ended"
    client = await third.ensure()
    assert (await client.status()).pid != pid
    assert not third.attached


async def test_two_at_once_start_one(supervise: Supervise) -> None:
    supervisors = [supervise() for _ in range(3)]
    clients = await asyncio.gather(*(supervisor.ensure() for supervisor in supervisors))
    assert len({(await client.status()).pid for client in clients}) == 1
    assert sorted(supervisor.attached for supervisor in supervisors) == [False, True, True]


def started_ui(home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", UI, str(home), *COMMAND]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told_by(ui: subprocess.Popen[str]) -> tuple[int, bool]:
    """The runtime's process, and whether the UI attached to it."""
    assert ui.stdout is not None
    pid, attached = ui.stdout.readline().split()
    return int(pid), attached == "True"


def test_two_uis_at_once_start_one(home: Path) -> None:
    uis = [started_ui(home) for _ in range(2)]
    try:
        told = [told_by(ui) for ui in uis]
        assert len({pid for pid, _ in told}) == 1
        assert sorted(attached for _, attached in told) == [False, True]
    finally:
        for ui in uis:
            ui.communicate(timeout=60)
    wait_until(lambda: ended(told[0][0]))
    assert not lock_path(home).exists()


async def test_a_crash_is_explained_and_the_next_one_starts(supervise: Supervise, home: Path) -> None:
    supervisor = supervise()
    client = await supervisor.ensure()
    before = (await client.status()).pid
    assert supervisor.crash_report() is None
    os.kill(before, signal.SIGKILL)
    await asyncio.to_thread(wait_until, supervisor.crash_report)
    assert "SIGKILL" in (supervisor.crash_report() or "")
    assert read_lock(lock_path(home)) is not None  # the killed process could not remove it
    with pytest.raises(ConnectionLostError):
        await client.status()
    client = await supervisor.ensure()
    assert (await client.status()).pid != before
    assert not supervisor.attached
    old = supervisor.log_file.with_name(OLD_LOG_NAME).read_text()
    assert f"the process {before} was killed (SIGKILL); possibly out of memory" in old
    assert old.count("was killed") == 1

    async def said(text: str) -> str:
        answer = client.chat([{"role": "user", "content": text}], ChatOptions(model="small"))
        return "".join([delta.text async for delta in answer])

    with pytest.raises(ConnectionLostError):
        await said("die now")  # in the middle of an answer
    client = await supervisor.restart()
    assert await said("echo back") == "back"


async def test_a_model_is_loaded_at_the_start(supervise: Supervise) -> None:
    client = await supervise(model="small").ensure()
    async with asyncio.timeout(20):
        while (await client.status()).state != "ready":  # noqa: ASYNC110 -- another process makes it true
            await asyncio.sleep(0.01)
    assert (await client.status()).model == "small"


async def test_a_runtime_that_cannot_start_says_why(supervise: Supervise) -> None:
    supervisor = supervise([*COMMAND, "--fail"])
    with pytest.raises(StartError, match="exit code 3") as failure:
        await supervisor.ensure()
    assert "ImportError: no such kernel" in str(failure.value)
    assert "warming up" in str(failure.value)
    with pytest.raises(StartError, match="No such file"):
        await supervise(["nothing-that-could-be-started"]).ensure()


async def test_a_runtime_that_never_answers_is_ended(supervise: Supervise, tmp_path: Path) -> None:
    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    supervisor = supervise([sys.executable, "-c", script, str(tmp_path / "pid")], start_timeout_s=1.0)
    with pytest.raises(StartError, match="did not respond within 1 s"):
        await supervisor.ensure()
    assert ended(int((tmp_path / "pid").read_text()))


async def test_a_lock_file_that_does_not_fit_is_not_believed(supervise: Supervise, home: Path) -> None:
    """One after another beside a runtime that would answer."""
    await supervise().ensure()
    record = read_lock(lock_path(home))
    assert record is not None
    own = psutil.Process()  # alive, but not the runtime
    wrong: list[dict[str, Any]] = [
        {"version": "0.0"},
        {"create_time": record.create_time - 50},
        {"token": "another"},
        {"port": 9},
        {"pid": own.pid, "create_time": own.create_time()},
    ]
    for changes in wrong:
        write_lock(lock_path(home), replace(record, **changes))
        assert is_alive(record), "the runtime that is not found"
        second = supervise(["nothing-that-could-be-started"])
        with pytest.raises(StartError, match="No such file"):  # it would start its own
            await second.ensure()
        assert not second.attached, changes
    client = await supervise().ensure()
    assert (await client.status()).pid != record.pid


async def test_a_runtime_of_another_version_is_left_alone(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    await supervise().ensure()
    monkeypatch.setattr("app.supervisor.program_version", lambda: "9.9")
    with pytest.raises(StartError, match="did not respond"):  # what it starts is not of that version either
        await supervise(start_timeout_s=0.1).ensure()


async def test_a_damaged_lock_file_is_replaced(supervise: Supervise, home: Path) -> None:
    damage(lock_path(home), "{")  # test_lock.py has every other damage
    assert (await (await supervise().ensure()).status()).state == "empty"


def test_killing_the_ui_ends_the_runtime(home: Path) -> None:
    ui = started_ui(home)
    pid, _ = told_by(ui)
    record = read_lock(lock_path(home))
    assert record is not None
    assert is_alive(record)
    ui.kill()
    wait_until(lambda: ended(pid))
    assert not lock_path(home).exists()
    ui.communicate()


def test_the_own_command_names_files_that_are_there() -> None:
    command = own_command()
    assert "runtime.server.process" in command
    for flag in ("--calibration", "--evaluation"):
        assert Path(command[command.index(flag) + 1]).is_file()


async def test_the_own_runtime_takes_nothing_from_the_current_folder(
    home: Path, planted: Callable[[], list[str]]
) -> None:
    supervisor = Supervisor(home)
    try:
        status = await (await supervisor.ensure()).status()
    finally:
        await supervisor.close()
    assert status.state == "empty"
    assert planted() == []
