"""The runtime process: `python -m runtime.server.process --home DIR [--parent-pid N] [--model NAME] ...`.

It listens on loopback, on a port chosen by the system and published in the lock file. It exits on request (SIGTERM,
Ctrl-C, `POST /runtime/shutdown`), or when its parent is gone or closes the pipe on its standard input, and cleans up
socket, model and lock file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path

from runtime import program_version
from runtime.errors import RuntimeFailure
from runtime.server import MAX_MODELS
from runtime.server.lock import LockRecord, lock_path, remove_lock, write_lock
from runtime.server.security import Security
from runtime.server.serve import GRACE_S, UNLOAD_S, bind, listen, stopped_by_signals
from runtime.server.service import Service
from runtime.system.lifetimes import ParentWatch, leash_on_stdin, own_record_time
from runtime.wire.requests import LoadRequest

HOST = "127.0.0.1"
LAST_RESORT_S = GRACE_S + UNLOAD_S + 4
"""Seconds after which a process that hangs on exit is terminated."""
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the runtime process. Returns its exit code."""
    from runtime.load.catalogue import Bundle
    from runtime.server.service import open_service

    parsed = _parser().parse_args(arguments)
    prepare(parsed.home)
    bundle = Bundle(models=dict(parsed.bundled), calibration=parsed.calibration, evaluation=parsed.evaluation)
    minutes: float | None = parsed.idle_unload
    service = open_service(
        parsed.home,
        bundle,
        idle_unload_s=None if minutes is None else 60 * minutes,
        chats=parsed.chats,
        max_models=parsed.max_models,
    )
    return run(service, home=parsed.home, parent_pid=parsed.parent_pid, model=parsed.model)


def prepare(home: Path) -> None:
    """Create the home folder, and log crashes, warnings and the reason of the exit to stderr."""
    faulthandler.enable()
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logger.setLevel(logging.INFO)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)


def run(service: Service, *, home: Path, parent_pid: int | None = None, model: str | None = None) -> int:
    """Serve until stopped or until the parent is gone.

    Args:
        service: The service; closed at the end.
        home: Folder of the lock file.
        parent_pid: The parent process; this process exits when it ends.
        model: Model to load at the start; the status reports a failure.

    Returns:
        The exit code.
    """
    try:
        clean = asyncio.run(_run(service, home, parent_pid, model))
    except (RuntimeFailure, OSError) as error:
        print(f"the runtime cannot start: {error}", file=sys.stderr)  # noqa: T201 -- the starting program reads stderr
        return 1
    except BaseException:
        logger.exception("ends after an unexpected error")
        raise
    logger.info("has ended%s", "" if clean else ", though a piece of work did not stop in time")
    if not clean:  # a thread hangs in native code: waiting for it could take forever
        sys.stderr.flush()
        os._exit(1)
    return 0


async def _run(service: Service, home: Path, parent_pid: int | None, model: str | None) -> bool:
    token = secrets.token_urlsafe(32)
    security = Security.for_bind(HOST, token, management_token=token)
    listener = bind(HOST, 0)
    record = LockRecord(
        pid=os.getpid(),
        create_time=own_record_time(),
        host=HOST,
        port=listener.getsockname()[1],
        token=token,
        version=program_version(),
    )
    path = lock_path(home)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(reason: str) -> None:
        logger.info("ends: %s", reason)
        stop.set()

    def parent_gone() -> None:
        did = "closed the pipe to it" if parent is not None and parent.runs() else "is gone"
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(end, f"the program that started it, process {parent_pid}, {did}")

    def signalled(number: int) -> None:
        end(f"it was sent {signal.Signals(number).name}")

    logger.info("process %d serves %s:%d, version %s", record.pid, record.host, record.port, record.version)
    parent = None if parent_pid is None else ParentWatch(parent_pid, leash_on_stdin())
    watch = nullcontext() if parent is None else parent.watching(parent_gone)
    loading = asyncio.create_task(_load(service, model)) if model is not None else None
    with watch, stopped_by_signals(signalled), _last_resort(stop, path, record):
        try:
            return await listen(service, security, listener, stop, lambda: write_lock(path, record))
        finally:
            remove_lock(path, record)
            if loading is not None:
                await asyncio.gather(loading, return_exceptions=True)


async def _load(service: Service, model: str) -> None:
    """Load the first model; the status keeps a failure."""
    async with aclosing(service.load(LoadRequest(model=model))) as reports:
        with contextlib.suppress(RuntimeFailure):
            async for _ in reports:
                pass


@contextlib.contextmanager
def _last_resort(stop: asyncio.Event, path: Path, record: LockRecord) -> Iterator[None]:
    """Terminate the process LAST_RESORT_S after `stop` is set, whatever it is doing."""

    def end() -> None:
        logger.error("did not end within %g s after it was asked to, and is cut off", LAST_RESORT_S)
        remove_lock(path, record)
        os._exit(1)

    async def arm() -> None:
        await stop.wait()
        remove_lock(path, record)  # so that no client connects to an exiting process
        timer.start()

    timer = threading.Timer(LAST_RESORT_S, end)
    timer.daemon = True
    arming = asyncio.create_task(arm())
    try:
        yield
    finally:
        arming.cancel()
        timer.cancel()


def _bundled(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER of the command line."""
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, Path(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.server.process", description="The process that runs models."
    )
    parser.add_argument("--home", type=Path, required=True, help="the program's folder: lock file and stored models")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone, or closes the pipe on our input")
    parser.add_argument("--model", help="a model to load at the start")
    parser.add_argument(
        "--idle-unload", type=float, metavar="MINUTES", help="unload the model after this much idle time"
    )
    parser.add_argument("--max-models", type=int, metavar="N", default=MAX_MODELS, help="most models that are loaded")
    parser.add_argument("--chats", type=Path, metavar="DIR", help="keep the caches of long conversations there")
    parser.add_argument("--bundled", type=_bundled, action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="text for quantizers")
    parser.add_argument("--evaluation", type=Path, metavar="FILE", help="text on which new models are measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
