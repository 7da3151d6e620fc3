"""A pull that is killed repeatedly ends with the result of an undisturbed one, and downloads nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from models.hub import cached, pull
from tests.models.hub.conftest import repository
from tests.models.hub.hub_server import PIECE, digest_of

NAME = "owner/tiny"
KILLS = 30
LONGEST_S = 0.6
MOST_BYTES = 1_000_000
"""A pull is killed before so much time has passed or, every second one, before so many more bytes have come."""
SHARD_BYTES = 1_500_000
BYTES_PER_S = 3e6
ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Worker:
    """A process that forks a child for every pull."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hub_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self, kill: dict[str, Any], **arguments: Any) -> None:
        """Begin a pull."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**arguments, "kill": kill}) + "\n")
        self._process.stdin.flush()

    def outcome(self) -> int:
        """Wait for its exit status, negative if it was killed."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> str:
        """End the process; returns what it complained about."""
        _, errors = self._process.communicate(timeout=30)
        return errors


@pytest.fixture
def make_worker() -> Iterator[Callable[[], Worker]]:
    started: list[Worker] = []

    def make() -> Worker:
        started.append(Worker())
        return started[-1]

    yield make
    assert [worker.close() for worker in started] == [""] * len(started)


def tree(cache: Path) -> dict[str, bytes | str]:
    """Every file and link below a cache, locks aside."""
    return {
        path.relative_to(cache).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in cache.rglob("*")
        if ".locks" not in path.parts and (path.is_symlink() or path.is_file())
    }


def there(cache: Path) -> dict[str, int]:
    """Bytes of every blob that are on disk, by digest."""
    sizes = {}
    for path in cache.rglob("blobs/*"):
        with suppress(FileNotFoundError):  # a file may get its final name between being listed and being measured
            sizes[path.name.removesuffix(".incomplete")] = path.stat().st_size
    return sizes


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for another process; the test's own timeout ends a wait in vain."""
    while not true():
        time.sleep(0.01)


def random_moment(generator: random.Random, present: int, kills: int) -> dict[str, float]:
    """When to kill the next pull; by bytes too, so that many hit a file in transit however slow the machine is."""
    if kills % 2:
        return {"bytes": present + generator.randint(1, MOST_BYTES)}
    return {"seconds": generator.uniform(0.0, LONGEST_S)}


@pytest.mark.slow
def test_killed_at_thirty_random_moments(hub: Any, tmp_path: Path, make_worker: Callable[[], Worker]) -> None:
    files = repository(shards=2, shard_bytes=SHARD_BYTES)
    hub.add(NAME, files)
    digests = {name: digest_of(name, content) for name, content in files.items()}
    sizes = {digests[name]: len(content) for name, content in files.items()}
    undisturbed = tree(pull(NAME, endpoint=hub.url, cache_dir=tmp_path / "whole").parents[2])
    hub.faults.bytes_per_s = BYTES_PER_S
    worker, generator = make_worker(), random.Random(0)
    kills = rounds = inside = 0
    while kills < KILLS:
        cache = tmp_path / f"round{rounds}"
        rounds += 1
        before: dict[str, int] = {}
        status = -signal.SIGKILL
        while status != 0:
            hub.log.clear()
            moment = {} if kills == KILLS else random_moment(generator, sum(before.values()), kills)
            worker.start(moment, name=NAME, endpoint=hub.url, cache_dir=str(cache))
            status = worker.outcome()
            assert status in (0, -signal.SIGKILL)
            for entry in hub.sent():
                digest = digests[entry.file]
                assert before.get(digest, 0) < sizes[digest], f"{entry.file} was whole and is fetched again"
                assert entry.start == before.get(digest, 0), f"{entry.file} does not go on where it was"
            after = there(cache)
            assert all(after.get(digest, 0) >= count for digest, count in before.items())
            inside += sum(0 < count < sizes[digest] for digest, count in after.items())
            before = after
            if status != 0:
                kills += 1
                half = cached(NAME, cache_dir=cache)
                assert half is None or tree(cache).items() >= undisturbed.items()
        assert tree(cache) == undisturbed
    assert inside >= KILLS // 3


def test_another_process_takes_over_from_a_killed_one(
    hub: Any, cache: Path, tmp_path: Path, make_worker: Callable[[], Worker]
) -> None:
    shard = "model-00001-of-00002.safetensors"
    files = repository(shards=2, shard_bytes=SHARD_BYTES)
    hub.add(NAME, files)
    released = threading.Event()
    hub.faults.hang = (shard, released)
    first, second = make_worker(), make_worker()
    arguments = {"name": NAME, "endpoint": hub.url, "cache_dir": str(cache)}
    digest = digest_of(shard, files[shard])
    first.start({"exists": str(tmp_path / "now")}, **arguments)
    wait_until(lambda: there(cache).get(digest) == PIECE)
    second.start({}, **arguments)
    wait_until(lambda: len([entry for entry in hub.log if "/api/" in entry.path]) == 2)
    (tmp_path / "now").touch()
    assert first.outcome() == -signal.SIGKILL
    hub.faults.hang = None
    released.set()
    assert second.outcome() == 0
    folder = cached(NAME, cache_dir=cache)
    assert folder is not None
    assert all(path.read_bytes() == files[path.name] for path in folder.iterdir())
    assert not list(cache.rglob("*.incomplete"))
    assert [entry.start for entry in hub.sent(shard)] == [0, PIECE]
    assert all(len(hub.sent(path.name)) == 1 for path in folder.iterdir() if path.name != shard)
