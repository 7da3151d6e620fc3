"""`Supervisor`: finds or starts the runtime process, restarts it after a crash, and stops what it started."""

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
from typing import TYPE_CHECKING

from app.client import RuntimeClient
from app.errors import ClientError, StartError
from app.language import _
from app.paths import cache_dir, chats_dir
from app.settings import DEFAULT_IDLE_MINUTES
from app.threads import run_to_end
from models.files import private_folder
from runtime import program_version
from runtime.server.lock import LockRecord, lock_path, read_lock, remove_lock, running_record
from runtime.system.child import child_command
from runtime.system.lifetimes import Job, own_job, running_process, still_runs

if TYPE_CHECKING:
    from psutil import Process

    from app.settings import Settings

START_TIMEOUT_S = 60.0
"""Maximum wait for a new process to respond, in seconds."""
ANSWER_TIMEOUT_S = 10.0
"""A runtime that does not report its status within this time is not attached to."""
END_TIMEOUT_S = 15.0
"""Maximum wait in seconds for a process that was asked to end; the process itself gives up sooner."""
TAIL_LINES = 12
"""Number of log lines shown in an error."""
LOG_NAME = "runtime.log"
OLD_LOG_NAME = "runtime.old.log"
"""The log file of the previous runtime."""
_POLL_S = 0.02
_SIGKILL = 9
_WITHOUT_CONSOLE = getattr(subprocess, "CREATE_NO_WINDOW", 0) | getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""Windows: no window of its own, and no Ctrl-C of the terminal's."""


class Supervisor:
    """One per UI. Several supervisors, even in different processes, share one runtime per home folder."""

    remedy = _("restarting it")

    def __init__(
        self,
        home: Path,
        *,
        command: Sequence[str] | None = None,
        model: str | None = None,
        idle_minutes: float | None = None,
        max_models: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare without starting anything.

        Args:
            home: The program's folder (`app.paths.home`).
            command: Command that starts a runtime; this program's own by default. `--home`, `--parent-pid`, `--model`
                and the two options below are appended.
            model: Model that a newly started runtime loads.
            idle_minutes: Minutes without a request after which a newly started runtime unloads its model until the
                next request; None or 0 for never.
            max_models: Most models that it keeps loaded; None for its own default.
            start_timeout_s: Maximum wait for a new process to respond, in seconds.
        """
        self.home = home
        self._command = None if command is None else tuple(command)
        self._model = model
        self._idle_minutes, self._max_models = idle_minutes, max_models
        self._start_timeout_s = start_timeout_s
        self._lock = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None  # the runtime's
        self._client: RuntimeClient | None = None
        self._job: Job | None = None
        self._noted = 0  # the process whose end is already logged

    @property
    def log_file(self) -> Path:
        """The log file with the runtime process's output, including warnings and crashes."""
        return self.home / LOG_NAME

    @property
    def attached(self) -> bool:
        """Whether the runtime in use was started by another process."""
        return self._client is not None and self._child is None

    async def ensure(self) -> RuntimeClient:
        """A client of a responding runtime: the current one, a running one, or a new one.

        Raises:
            StartError: a runtime could not be started.
        """
        async with self._lock:
            if self._client is not None and await asyncio.to_thread(still_runs, self._process):
                return self._client  # it may be too busy to respond at once; callers that find it hanging call restart
            await self._disconnect()
            return await self._connect()

    async def restart(self) -> RuntimeClient:
        """Like `ensure`, but ends the runtime first if this supervisor started it.

        Raises:
            StartError: a runtime could not be started.
        """
        async with self._lock:
            await self._disconnect()
            return await self._connect()

    async def close(self) -> None:
        """Stop the runtime if this supervisor started it, and disconnect. Safe to call twice."""
        async with self._lock:
            await self._disconnect()

    def crash_report(self) -> str | None:
        """How the runtime in use ended, with the last lines of its log if it was started here; None while it runs."""
        if self._child is None:
            ended = self._process is not None and not still_runs(self._process)
            return _("the runtime, which another program started, has ended") if ended else None
        code = self._child.poll()
        if code is not None and code != 0:
            self._note_killed(code)
        return None if code is None else _("the runtime {how}{tail}", how=_ending(code), tail=self._tail())

    async def _connect(self) -> RuntimeClient:
        try:
            await asyncio.to_thread(importlib.import_module, "httpx")  # slow enough to make a UI stutter
            private_folder(self.home)
            async with self._starting():
                running = await asyncio.to_thread(self._running)
                if running is not None and await self._usable(running):
                    return self._use(running)
                return self._use(await self._start(running))
        except OSError as error:
            raise StartError(
                _(
                    "the runtime can't be started in {home}: {reason}",
                    home=self.home,
                    reason=error.strerror or error,
                )
            ) from error

    def _use(self, record: LockRecord) -> RuntimeClient:
        self._process = running_process(record.pid)
        self._client = RuntimeClient(record.base_url, record.token)
        return self._client

    def _running(self) -> LockRecord | None:
        """The runtime named in the lock file, if it is alive and has this version."""
        record = running_record(self.home)
        return record if record is not None and record.version == program_version() else None

    async def _usable(self, record: LockRecord) -> bool:
        """Whether the runtime of a record responds and is the recorded one."""
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
        """Hold the right to start a runtime in this home; the system releases it when the process dies."""
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
                        _(
                            "another program has been starting the runtime for a long time; "
                            "stop that program and try again"
                        )
                    ) from None
                await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.release()

    async def _start(self, unusable: LockRecord | None) -> LockRecord:
        """Start a process and wait until it responds."""
        deadline = time.monotonic() + self._start_timeout_s
        try:
            await run_to_end(self._spawn)
            while True:
                late = time.monotonic() > deadline  # before the look, in case this process was stopped for that long
                if (report := self.crash_report()) is not None:
                    raise StartError(_("the runtime could not be started: {report}", report=report))
                record = await asyncio.to_thread(self._running)
                if record is not None and record != unusable and await self._usable(record):
                    return record
                if late:
                    raise StartError(
                        _(
                            "the runtime did not respond within {time:g} s{tail}",
                            time=self._start_timeout_s,
                            tail=self._tail(),
                        )
                    )
                await asyncio.sleep(_POLL_S)
        except BaseException:
            await self._end_child()
            raise

    def _note_killed(self, code: int) -> None:
        """Log how the process ended, once; a killed process can't do so itself."""
        if self._child is None or self._child.pid == self._noted:
            return
        self._noted = self._child.pid
        why = _("; possibly out of memory, see the system log") if code == -_SIGKILL else ""
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as log:
            log.write(
                _(
                    "{time} the process {pid} {how}{why}",
                    time=time.strftime("%Y-%m-%d %H:%M:%S"),
                    pid=self._child.pid,
                    how=_ending(code),
                    why=why,
                )
                + "\n"
            )

    def _spawn(self) -> None:
        """Start the process with its output in a new log file; the previous log is kept next to it."""
        with contextlib.suppress(OSError):
            self.log_file.replace(self.log_file.with_name(OLD_LOG_NAME))
        log = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        arguments = ["--home", str(self.home), "--parent-pid", str(os.getpid())]
        if self._idle_minutes:
            arguments += ["--idle-unload", f"{self._idle_minutes:g}"]
        if self._max_models:
            arguments += ["--max-models", str(self._max_models)]
        if self._model is not None:
            arguments += ["--model", self._model]
        try:
            self._child = subprocess.Popen(
                [*(self._command or own_command()), *arguments],
                stdin=subprocess.PIPE,  # closes when this process ends, however it does
                stdout=log,
                stderr=log,
                env={"LOWBIT_CHAT_KERNEL_CACHE": str(cache_dir() / "kernels"), **os.environ},
                start_new_session=True,  # Ctrl-C at the terminal goes to the UI, which stops the runtime cleanly
                creationflags=_WITHOUT_CONSOLE,
            )
        finally:
            os.close(log)
        with contextlib.suppress(OSError):  # the pipe and the runtime's own look at its parent remain
            self._job = self._job or own_job()
            if self._job is not None:
                self._job.add(self._child.pid)

    async def _disconnect(self) -> None:
        """Close the client, and stop the process if it is ours."""
        client, self._client, self._process = self._client, None, None
        if client is not None:
            await client.aclose()
        await self._end_child()

    async def _end_child(self) -> None:
        """Stop the process that this supervisor started, and clean up after a killed one."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()  # asks it to end, on every system
        if child.poll() is None:
            if sys.platform != "win32":  # there, terminating is killing
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


def supervisor_of(home: Path, settings: Settings) -> Supervisor:
    """A supervisor as the settings want it."""
    minutes = settings.idle_unload
    idle_minutes = DEFAULT_IDLE_MINUTES if minutes is None else minutes
    return Supervisor(home, idle_minutes=idle_minutes, max_models=settings.max_models)


def own_command() -> list[str]:
    """The command that starts this program's runtime."""
    import assets

    return child_command(
        "runtime.server.process",
        "--bundled",
        f"demo={assets.demo_path()}",
        "--calibration",
        str(assets.calibration_file()),
        "--evaluation",
        str(assets.evaluation_file()),
        "--chats",
        str(chats_dir()),
    )


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return _("ended with exit code {code}", code=code)
    try:
        return _("was killed ({name})", name=signal.Signals(-code).name)
    except ValueError:
        return _("was killed (signal {number})", number=-code)
