"""A child process that answers: it is started again whenever it ended, however soon the next request comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from runtime.system import child_process
from runtime.system.child_process import ChildProcess

BODY = """
import os, sys
for line in sys.stdin:
    if line == "end\\n":
        os._exit(3)
    print(line.strip(), flush=True)
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    """Answers a request with one line that repeats it; ends when it is asked to."""
    monkeypatch.setattr(child_process, "child_command", lambda *_: [sys.executable, "-I", "-S", "-c", BODY])
    child = ChildProcess("any")
    yield child
    child.close()


def test_the_next_request_starts_it_again(child: ChildProcess) -> None:
    for number in range(20):
        assert list(child.lines(b"end")) == []
        assert next(child.lines(f"{number}".encode())) == f"{number}\n".encode()
        child.kill()
        assert next(child.lines(b"again")) == b"again\n"
