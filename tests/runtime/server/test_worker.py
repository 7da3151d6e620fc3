from __future__ import annotations

import asyncio
import threading
import time

import pytest

from runtime.errors import Cancelled
from runtime.server.worker import Stream, Worker


async def test_items_arrive_in_order_and_the_error_comes_last() -> None:
    stream: Stream[int] = Stream()

    def work() -> None:
        for i in range(100):
            stream.put(i)
        stream.end(ValueError("at the end"))

    thread = threading.Thread(target=work)
    thread.start()
    seen = []

    async def read() -> None:
        async for item in stream.read():
            seen.append(item)  # noqa: PERF401 -- a comprehension would lose them all with the error

    with pytest.raises(ValueError, match="at the end"):
        await read()
    thread.join()
    assert seen == list(range(100))


async def test_closing_the_reader_tells_the_worker() -> None:
    stream: Stream[int] = Stream()
    stream.put(1)
    reader = stream.read()
    assert await anext(reader) == 1
    assert not stream.cancelled()
    await reader.aclose()
    assert stream.cancelled()


def test_a_stream_whose_loop_is_gone_counts_as_cancelled() -> None:
    async def make() -> Stream[int]:
        return Stream()

    stream = asyncio.run(make())
    stream.put(1)
    assert stream.cancelled()


def test_a_closed_worker_takes_nothing() -> None:
    worker = Worker("test")
    worker.close(lambda: None)
    worker.close(lambda: None)
    with pytest.raises(Cancelled):
        worker.submit(lambda: None)
    assert worker.join(10)


def test_idle_job_runs_once_for_each_rest() -> None:
    worker, rested, seen = Worker("test"), threading.Event(), []

    def rest() -> None:
        seen.append("rest")
        rested.set()

    worker.when_idle(0.02, rest)
    assert rested.wait(10)
    rested.clear()
    assert not rested.wait(0.1)
    worker.submit(lambda: seen.append("job"))
    assert rested.wait(10)
    worker.close(lambda: None)
    assert worker.join(10)
    assert seen == ["rest", "job", "rest"]


def test_idle_jobs_run_by_their_time_and_see_what_waits() -> None:
    """A long idle job that polls `waiting` ends when a job comes; the next idle job waits for its own time."""
    worker, seen, begun = Worker("test"), [], threading.Event()

    def long() -> None:
        seen.append("long")
        begun.set()
        while not worker.waiting and len(seen) < 3:
            time.sleep(0.001)

    ended = threading.Event()
    worker.when_idle(0.05, ended.set)
    worker.when_idle(0.01, long)
    assert begun.wait(10)
    worker.submit(lambda: seen.append("job"))
    worker.submit(lambda: seen.append("another"))
    assert ended.wait(10)
    worker.close(lambda: None)
    assert worker.join(10)
    assert seen[:4] == ["long", "job", "another", "long"]
