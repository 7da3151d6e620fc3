"""A pull that is killed again and again ends with what an undisturbed one makes, and fetches nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from models.hub import cached, pull

NAME = "owner/tiny"
KILLS = 30
LONGEST_S = 0.6
"""A pull is killed between its start and this."""
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

    def start(self, kill_after_s: float | None, **arguments: Any) -> None:
        """Begin a pull."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**arguments, "kill_after_s": kill_after_s}) + "\n")
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
    return {path.name.removesuffix(".incomplete"): path.stat().st_size for path in cache.rglob("blobs/*")}


@pytest.mark.slow
def test_killed_at_thirty_random_moments(
    hub: Any, tmp_path: Path, make_repository: Any, make_worker: Callable[[], Worker]
) -> None:
    import hub_server

    files = make_repository(shards=2, shard_bytes=SHARD_BYTES)
    hub.add(NAME, files)
    digests = {name: hub_server.digest_of(name, content) for name, content in files.items()}
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
            kill_after_s = generator.uniform(0.0, LONGEST_S) if kills < KILLS else None
            worker.start(kill_after_s, name=NAME, endpoint=hub.url, cache_dir=str(cache))
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
    assert rounds > 1


def test_another_process_takes_over_from_a_killed_one(
    hub: Any, cache: Path, make_repository: Any, make_worker: Callable[[], Worker]
) -> None:
    files = make_repository(shards=2, shard_bytes=SHARD_BYTES)
    hub.add(NAME, files)
    hub.faults.bytes_per_s = BYTES_PER_S
    first, second = make_worker(), make_worker()
    arguments = {"name": NAME, "endpoint": hub.url, "cache_dir": str(cache)}

    first.start(0.5, **arguments)
    second.start(None, **arguments)

    assert (first.outcome(), second.outcome()) == (-signal.SIGKILL, 0)
    folder = cached(NAME, cache_dir=cache)
    assert folder is not None
    assert all(path.read_bytes() == files[path.name] for path in folder.iterdir())
    assert len(list(folder.iterdir())) == 8
    assert not list(cache.rglob("*.incomplete"))
    for name in files:
        starts = [entry.start for entry in hub.sent(name)]
        assert starts == sorted(set(starts)), f"{name} was fetched twice"
