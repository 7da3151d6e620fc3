"""Decoding speed by cache length, compared with llama.cpp: separate processes that take turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.backends.cpu.pool import default_threads
from tests.bench.caches.extent import Extent
from tests.bench.caches.laboratory import Notebook
from tests.bench.caches.shape_sizes import described
from tests.bench.quality.llama import PeerError
from tests.bench.reporting.cases import ROOT
from tests.bench.reporting.results import digest

PEER_TYPES = ("f16", "q4_0")
"""llama.cpp's types of cache."""
STEPS = 8
"""Tokens of a turn."""
LONG_TURN = 288
"""Tokens of the turn that shows what compressing a page takes: two pages and more."""


class _Worker:
    """A program in its own process."""

    def __init__(self, python: str, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.about = self._answer()

    def run(self, kind: str, count: int) -> list[float]:
        """Seconds of so many tokens over one kind of cache."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {count}\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in self._answer()]

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=120)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, error = self._process.communicate()
            raise PeerError(f"a program that is timed ended early: {(error.strip().splitlines() or ['no output'])[-1]}")
        return json.loads(line)


def measure(notebook: Notebook, extent: Extent, peer_python: str | None, scratch: Path) -> None:
    """Measure what is missing.

    Args:
        notebook: What is known, and where numbers go.
        extent: Kinds, lengths and rounds.
        peer_python: Interpreter with llama-cpp-python and gguf; None where there is none.
        scratch: Folder for llama.cpp's model.
    """
    peers = PEER_TYPES if peer_python else ()
    code = digest([notebook.codes.cpu, described()])
    for tokens in extent.contexts:
        identity = {"tokens": tokens, "kinds": list(extent.kinds), "peers": peers, "threads": default_threads()}

        def run(tokens: int = tokens) -> dict[str, Any]:
            notebook.tell(f"decoding with {tokens} tokens in the cache")
            return _turns(tokens, extent.kinds, extent.rounds, peer_python, scratch)

        notebook.attempt(
            f"decoding with {tokens} tokens",
            lambda i=identity, r=run: notebook.known("speed", i, code, r),  # type: ignore[misc]
        )


def _turns(tokens: int, kinds: Sequence[str], rounds: int, peer_python: str | None, scratch: Path) -> dict[str, Any]:
    """Let everything decode a few tokens in turns, a first turn of each not counted."""
    workers: list[tuple[str, _Worker, Sequence[str]]] = []
    times: dict[str, list[float]] = {}
    try:
        room = str(LONG_TURN + 128)
        ours = _Worker(sys.executable, "tests.bench.caches.worker", str(tokens), room, *kinds)
        workers.append(("", ours, kinds))
        if peer_python is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            arguments = (str(scratch / "slim.gguf"), str(ours.about["threads"]), str(tokens), str(STEPS), *PEER_TYPES)
            workers.append(
                ("llama.cpp ", _Worker(peer_python, "tests.bench.caches.llama_worker", *arguments), PEER_TYPES)
            )
        for number in range(rounds + 1):
            for name, worker, which in workers:
                for kind in which:
                    seconds = worker.run(kind, STEPS)
                    if number:
                        times.setdefault(name + kind, []).append(statistics.median(seconds))
        pauses = {kind: _pauses(ours.run(kind, LONG_TURN)) for kind in kinds}
    finally:
        for _, worker, _ in workers:
            worker.close()
    rows = []
    for name, each in times.items():
        held = ours.about["kinds"].get(name, {})
        rows.append({"kind": name, "p50": statistics.median(each), "best": min(each), **held, **pauses.get(name, {})})
    about = {key: ours.about[key] for key in ("threads", "weight_bytes")}
    return {"tokens": tokens, "rounds": rounds, "steps": STEPS, **about, "peer": _version(workers), "rows": rows}


def _pauses(seconds: list[float]) -> dict[str, float]:
    """Of one long turn: the median token, the mean one and the longest, in which a page may be compressed."""
    return {"turn_p50": statistics.median(seconds), "turn_mean": statistics.fmean(seconds), "longest": max(seconds)}


def _version(workers: Sequence[tuple[str, _Worker, Sequence[str]]]) -> str | None:
    return next((worker.about["version"] for name, worker, _ in workers if name), None)
