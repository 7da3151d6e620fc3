"""`Supervisor`: finds the runtime process or starts it, starts it again after a crash, and ends what it started."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from app.client import RuntimeClient
from app.errors import ClientError, StartError
from app.paths import cache_dir, chats_dir, private_folder
from runtime.lock import LockRecord, is_alive, lock_path, program_version, read_lock, remove_lock

START_TIMEOUT_S = 60.0
"""Longest wait for a new process to answer."""
ANSWER_TIMEOUT_S = 10.0
"""A runtime that does not tell its status in this time is not one to attach to."""
END_TIMEOUT_S = 15.0
"""Longest wait for a process that was asked to end; the process itself gives up sooner."""
TAIL_LINES = 12
"""Lines of the log that an error shows."""
LOG_NAME = "runtime.log"
OLD_LOG_NAME = "runtime.old.log"
"""The log of the runtime before."""
_POLL_S = 0.02


class Supervisor:
    """One per UI. Several of them, in any processes, share one runtime of a home folder."""

    remedy = "it is started again"

    def __init__(
        self,
        home: Path,
        *,
        command: Sequence[str] | None = None,
        model: str | None = None,
        idle_minutes: float | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            home: The program's folder (`app.paths.home`).
            command: Starts a runtime; this program's own by default. `--home`, `--parent-pid`, `--model`
                and `--idle-unload` are added.
            model: A model that a newly started runtime loads.
            idle_minutes: Time without a request after which a newly started runtime unloads its model, until the next
                one; None or 0: never.
            start_timeout_s: Longest wait for a new process to answer.
        """
        self.home = home
        self._command = None if command is None else tuple(command)
        self._model = model
        self._idle_minutes = idle_minutes
        self._start_timeout_s = start_timeout_s
        self._lock = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._record: LockRecord | None = None
        self._client: RuntimeClient | None = None
        self._noted = 0  # the process whose end is in the log

    @property
    def log_file(self) -> Path:
        """What the runtime process printed since it was started, warnings and crashes included."""
        return self.home / LOG_NAME

    @property
    def attached(self) -> bool:
        """Whether the runtime that is used was started by somebody else."""
        return self._client is not None and self._child is None

    async def ensure(self) -> RuntimeClient:
        """A client of a runtime that answers: the one used so far, a running one, or a new one.

        Raises:
            StartError: a runtime could not be started.
        """
        async with self._lock:
            if (
                self._client is not None
                and self._record is not None
                and await asyncio.to_thread(is_alive, self._record)
            ):
                return self._client  # it may be too busy to answer at once; who finds it hanging calls restart
            await self._let_go()
            return await self._connect()

    async def restart(self) -> RuntimeClient:
        """Like `ensure`, but ends the runtime first if this supervisor started it.

        Raises:
            StartError: a runtime could not be started.
        """
        async with self._lock:
            await self._let_go()
            return await self._connect()

    async def close(self) -> None:
        """End the runtime if this supervisor started it, and let go of it. Safe to call twice."""
        async with self._lock:
            await self._let_go()

    def crash_report(self) -> str | None:
        """How the process that this supervisor started ended, with the last lines of its log; None while it runs."""
        code = None if self._child is None else self._child.poll()
        if code is not None and code != 0:
            self._note_killed(code)
        return None if code is None else f"the runtime {_ending(code)}{self._tail()}"

    async def _connect(self) -> RuntimeClient:
        try:
            await asyncio.to_thread(importlib.import_module, "httpx")  # slow enough to make a UI stutter
            private_folder(self.home)
            async with self._starting():
                found = await asyncio.to_thread(self._running)
                if found is not None and await self._usable(found):
                    return self._use(found)
                return self._use(await self._start(found))
        except OSError as error:
            raise StartError(f"the runtime cannot be started in {self.home}: {error.strerror or error}") from error

    def _use(self, record: LockRecord) -> RuntimeClient:
        self._record = record
        self._client = RuntimeClient(record.base_url, record.token)
        return self._client

    def _running(self) -> LockRecord | None:
        """The runtime that the lock file names, if it is alive and of this version."""
        record = read_lock(lock_path(self.home))
        return record if record is not None and record.version == program_version() and is_alive(record) else None

    async def _usable(self, record: LockRecord) -> bool:
        """Whether the runtime of a record answers, and is the one that the record names."""
        client = RuntimeClient(record.base_url, record.token)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status = await client.status()
        except (ClientError, TimeoutError):
            return False
        finally:
            await client.aclose()
        return status.pid == record.pid and status.version == record.version

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """The right to start a runtime in this home; the system takes it back from a process that dies."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.home / "runtime.lock", timeout=0, thread_local=False)
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                lock.acquire()
                break
            except Timeout:
                if time.monotonic() > deadline:
                    raise StartError(
                        "another program has been starting the runtime for a long time: end it, and try again"
                    ) from None
                await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.release()

    async def _start(self, unusable: LockRecord | None) -> LockRecord:
        """Start a process and wait until it answers."""
        await asyncio.to_thread(self._spawn)
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while time.monotonic() < deadline:
                if (report := self.crash_report()) is not None:
                    raise StartError(f"the runtime could not be started: {report}")
                record = await asyncio.to_thread(self._running)
                if record is not None and record != unusable and await self._usable(record):
                    return record
                await asyncio.sleep(_POLL_S)
            raise StartError(f"the runtime did not answer within {self._start_timeout_s:g} s{self._tail()}")
        except BaseException:
            await self._end_child()
            raise

    def _note_killed(self, code: int) -> None:
        """Write into the log how the process ended: one that was killed could not say so itself. Done once."""
        if self._child is None or self._child.pid == self._noted:
            return
        self._noted = self._child.pid
        why = "; out of memory, perhaps: the system's own log tells" if code == -signal.SIGKILL else ""
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the process {self._child.pid} {_ending(code)}{why}\n")

    def _spawn(self) -> None:
        """Start the process; what it prints goes to the log file, which begins anew. The one before is kept beside."""
        with contextlib.suppress(OSError):
            self.log_file.replace(self.log_file.with_name(OLD_LOG_NAME))
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        arguments = ["--home", str(self.home), "--parent-pid", str(os.getpid())]
        if self._idle_minutes:
            arguments += ["--idle-unload", f"{self._idle_minutes:g}"]
        if self._model is not None:
            arguments += ["--model", self._model]
        try:
            self._child = subprocess.Popen(
                [*(self._command or own_command()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"LOWBIT_CHAT_KERNEL_CACHE": str(cache_dir() / "kernels"), **os.environ},
                start_new_session=True,  # Ctrl-C at the terminal is for the UI, which ends the runtime in order
            )
        finally:
            os.close(log)

    async def _let_go(self) -> None:
        """Close the client, and end the process if it is ours."""
        client, self._client, self._record = self._client, None, None
        if client is not None:
            await client.aclose()
        await self._end_child()

    async def _end_child(self) -> None:
        """End the process that this supervisor started, and what a killed one left behind."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.terminate()
            try:
                await asyncio.to_thread(child.wait, END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                await asyncio.to_thread(child.wait)
        path = lock_path(self.home)
        record = read_lock(path)
        if record is not None and record.pid == child.pid:
            remove_lock(path, record)

    def _tail(self) -> str:
        """The last lines of the log, for a message."""
        try:
            text = self.log_file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip() and " INFO " not in line][-TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def own_command() -> list[str]:
    """What starts this program's runtime."""
    import assets

    return [
        sys.executable,
        "-m",
        "runtime.process",
        "--bundled",
        f"demo={assets.demo_path()}",
        "--calibration",
        str(assets.calibration_file()),
        "--evaluation",
        str(assets.evaluation_file()),
        "--chats",
        str(chats_dir()),
    ]


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed (signal {-code})"
