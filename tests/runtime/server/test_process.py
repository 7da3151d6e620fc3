"""The runtime process as a real child, with a fake model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fake_engine import make_service

from runtime import program_version
from runtime.server.lock import LockRecord, lock_path, read_lock, write_lock
from runtime.server.process import main, run
from runtime.system.lifetimes import ParentWatch, process_create_time
from tests.runtime.server.conftest import wait_until

FAKE = Path(__file__).parent / "fake_runtime.py"
FROM = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, *sys.argv[1:], "--parent-pid", str(__import__("os").getpid())])
print(child.pid, flush=True)
time.sleep(600)
"""


Start = Callable[..., tuple[subprocess.Popen[bytes], LockRecord]]
"""Starts a runtime, with arguments of its command; its log is beside the home."""


def connects(record: LockRecord) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((record.host, record.port)) == 0


def ended(pid: int) -> bool:
    """Whether a process is gone, or has ended and is only not yet cleared away by its parent."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ask(record: LockRecord, method: str, path: str, **options: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {record.token}"}
    return httpx.request(method, record.base_url + path, headers=headers, timeout=20, **options)  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, **options: object) -> tuple[subprocess.Popen[bytes], LockRecord]:
        command = [sys.executable, str(FAKE), "--home", str(home), *arguments]
        with log_of(home).open("w") as log:
            child = subprocess.Popen(command, start_new_session=True, stderr=log, **options)  # type: ignore[call-overload]
        children.append(child)
        wait_until(lambda: read_lock(lock_path(home)) is not None or child.poll() is not None)
        record = read_lock(lock_path(home))
        assert record is not None
        return child, record

    yield run
    for child in children:
        child.kill()
        child.communicate()


def log_of(home: Path) -> Path:
    return home.with_name("log")


def test_it_says_where_it_listens_and_answers_its_token_alone(start: Start, home: Path) -> None:
    """With the model that was to be loaded at the start."""
    child, record = start("--model", "small")
    assert record.pid == child.pid
    assert record.create_time == psutil.Process(child.pid).create_time()
    assert (record.host, record.version) == ("127.0.0.1", program_version())
    assert len(record.token) >= 32
    assert home.stat().st_mode & 0o777 == 0o700
    for path in ("/runtime/status", "/v1/models"):
        assert httpx.get(record.base_url + path).status_code == 401
    wait_until(lambda: ask(record, "GET", "/runtime/status").json()["state"] == "ready")
    assert ask(record, "GET", "/runtime/status").json()["pid"] == child.pid
    body = {"model": "small", "messages": [{"role": "user", "content": "echo hi"}]}
    answer = ask(record, "POST", "/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "hi"


def test_a_model_that_cannot_be_loaded_at_the_start_is_told(
    start: Start,
) -> None:
    _, record = start("--model", "broken")
    wait_until(lambda: ask(record, "GET", "/runtime/status").json()["state"] == "failed")
    assert "quantize" in ask(record, "GET", "/runtime/status").json()["error"]["message"]


@pytest.mark.parametrize(
    ("how", "busy"),
    [
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGINT, True),
        (signal.SIGHUP, True),
        ("shutdown", True),
    ],
    ids=str,
)
def test_it_ends_when_asked_and_leaves_a_log_alone(
    start: Start, home: Path, how: signal.Signals | str, busy: bool
) -> None:
    child, record = start()
    client = httpx.Client(headers={"Authorization": f"Bearer {record.token}"}, timeout=20)
    body = {"model": "small", "messages": [{"role": "user", "content": "slow 190"}], "stream": True}
    with client:
        if busy:
            request = client.build_request("POST", f"{record.base_url}/v1/chat/completions", json=body)
            stream = client.send(request, stream=True)
            next(stream.iter_lines())
        if isinstance(how, signal.Signals):
            child.send_signal(how)
        else:
            assert ask(record, "POST", "/runtime/shutdown").status_code == 200
        assert child.wait(30) == 0
    assert list(home.iterdir()) == []
    assert not connects(record)
    said = log_of(home).read_text()
    assert f"process {child.pid} serves 127.0.0.1:" in said
    assert (f"ends: it was sent {how.name}" if isinstance(how, signal.Signals) else "POST /runtime/shutdown") in said
    assert said.splitlines()[-1].endswith("has ended")


def test_it_ends_when_its_parent_is_killed(home: Path) -> None:
    with log_of(home).open("w") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", FROM, str(FAKE), "--home", str(home)],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        wait_until(lambda: read_lock(lock_path(home)))
        record = read_lock(lock_path(home))
        assert record is not None
        assert connects(record)
        parent.kill()  # and not waited for: it stays listed, as under a parent that does not clear it away
        wait_until(lambda: ended(pid))
        assert not lock_path(home).exists()
        assert not connects(record)
        said = log_of(home).read_text()
        assert f"ends: the program that started it, process {parent.pid}, is gone" in said
    finally:
        parent.wait()
        parent.stdout.close()
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_parent_that_is_gone_already_ends_it(home: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    child = subprocess.run(
        [sys.executable, str(FAKE), "--home", str(home), "--parent-pid", str(gone.pid)], timeout=60, check=False
    )
    assert child.returncode == 0
    assert not lock_path(home).exists()


def test_another_runtimes_lock_file_stays(start: Start, home: Path) -> None:
    child, record = start()
    other = LockRecord(pid=1, create_time=1.0, host="127.0.0.1", port=1, token="t", version="1")
    write_lock(lock_path(home), other)
    child.terminate()
    assert child.wait(30) == 0
    assert read_lock(lock_path(home)) == other
    assert record != other


def test_a_home_that_cannot_be_written_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "runtime.json").mkdir(parents=True)  # the rename onto it fails
    service, _ = make_service()
    assert run(service, home=home) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("the runtime cannot start")
    assert [file.name for file in home.iterdir()] == ["runtime.json"]


def test_it_explains_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, said in (
        (["--help"], 0, "--parent-pid"),
        (["--home", "x", "--bundled", "y"], 2, "NAME=FOLDER"),
    ):
        with pytest.raises(SystemExit) as ends:
            main(arguments)
        assert ends.value.code == code
        assert said in "".join(capsys.readouterr())


def test_starting_does_not_import_heavy_libraries() -> None:
    code = (
        "import sys, runtime.server.process, runtime.server.serve;"
        "import runtime.load.loading, runtime.load.catalogue;"
        "print([name for name in ('torch', 'transformers', 'numba', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_living_parent_is_not_gone_and_a_reused_number_is() -> None:
    watch = ParentWatch(os.getpid())
    assert not watch.gone()
    watch._parent = psutil.Process(os.getppid())
    watch._parent._ident = (os.getpid(), 1.0)  # of an earlier process with the same number
    watch._parent._pid = os.getpid()
    assert watch.gone()


@pytest.mark.skipif(sys.platform != "linux", reason="there, creation times follow the system's clock")
def test_a_clock_that_is_set_ends_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ParentWatch(os.getpid())
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: time.time() + 3600)
    assert process_create_time(os.getpid()) > time.time()
    assert not watch.gone()


def test_it_ends_at_once_when_the_pipe_on_its_input_closes(start: Start, home: Path) -> None:
    """Whoever started it need not have ended: on Windows, that is how it is asked to end."""
    child, _ = start("--parent-pid", str(os.getpid()), stdin=subprocess.PIPE)
    assert child.poll() is None
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(30) == 0
    assert read_lock(lock_path(home)) is None
