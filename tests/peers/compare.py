"""Side by side with llama.cpp on this machine: the same model, one run, programs taking turns.

    python -m tests.peers.make_gguf FOLDER [--source MODEL.gguf]
    python -m tests.peers.compare FOLDER --peer-python PATH --out tests/peers/results/NAME.json
    python -m tests.peers.compare FOLDER --stored 3=STORE/name --stored 4=STORE/name --spinners 0,1,2,4
    python -m tests.peers.compare --before TREE             without llama.cpp

    python -m tests.peers.compare --before TREE --starts 9 --rounds 3

Without `--stored` the weights are random, and the shape is that of FOLDER/shape.gguf, or a Llama's of 1.1 billion
parameters. Each round runs every program once, so that what else the machine does hits all alike; medians over the
rounds. The percentage is the bytes of weights read for a token times tokens per second, over this machine's read
bandwidth, measured in every round.
TREE is a checkout of another version of lowbit-chat, which takes its turns too. Where a process's memory lies makes it
faster or slower by up to a tenth for as long as it runs. So programs are told apart by many starts, in an order drawn
anew each time: what counts is the median of what one took longer than the other after the same start.
Spinners are processes that do nothing but take processor time; a machine of C cores and C threads leaves each thread
C / (C + spinners) of a core.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.reporting.origin import stamp
from tests.bench.reporting.run import write_report
from tuner.bandwidth import read_bandwidth
from tuner.detect import detect_cpu

_OURS, _BEFORE = "lowbit-chat", "lowbit-chat before"
K_CHUNKS = (16, 64)
PEERS = ("Q4_K_M", "Q3_K_M")


class Worker:
    """A program in its own process."""

    def __init__(self, python: str, *arguments: str, tree: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "tests.peers.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tree,
        )
        about = self._answer()
        self.bytes_per_token, self.version = int(about["bytes_per_token"]), str(about["version"])

    def run(self, action: str, count: int) -> list[float]:
        """Seconds of a prefill, or of each decoded token."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{action} {count}\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in self._answer()]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a program under comparison ended early: {self._process.args!r}")
        return json.loads(line)


_LLAMA, _OTHER = "a Llama shape of 1.1 billion parameters, random weights", "random weights of the shape in FOLDER"


def _shape_in(folder: Path | None) -> Path | None:
    """The file whose shape our random weights have; None: a Llama's of 1.1 billion parameters."""
    file = None if folder is None else folder / "shape.gguf"
    return file if file is not None and file.exists() else None


def programs(
    folder: Path | None, stored: Mapping[str, str], peer_python: str, before: Path | None
) -> dict[str, Callable[[], Worker]]:
    """How to start every program that is compared, by its name.

    Args:
        folder: Where `make_gguf` wrote its files; None: llama.cpp stays out.
        stored: Folders of stored models by bits; none: random weights.
        peer_python: Interpreter that has llama-cpp-python.
        before: Checkout of another version of this program.
    """
    found: dict[str, Callable[[], Worker]] = {}
    trees = {_OURS: None} | ({_BEFORE: before} if before else {})
    shape = _shape_in(folder)
    like = f":{shape}" if shape else ""
    for bits in ("4", "3"):
        model = stored.get(bits, bits + like)
        for k_chunk in (0, *K_CHUNKS):
            compensated = f", k_chunk {k_chunk}" if k_chunk else ""
            for name, tree in trees.items():
                worker = partial(Worker, sys.executable, "ours", model, str(k_chunk), tree=tree)
                found[f"{name} {bits}-bit{compensated}"] = worker
    for file in (folder / f"{kind}.gguf" for kind in PEERS if folder is not None):
        found[f"llama.cpp {file.stem}"] = partial(Worker, peer_python, "llama", str(file))
    return found


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that take all the processor time that they get."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2 if running else 0.0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@dataclass(slots=True)
class Seconds:
    """What one program took, a list for each start."""

    decode: list[list[float]] = field(default_factory=list)
    """Seconds per decoded token, one for each round."""
    prefill: list[list[float]] = field(default_factory=list)
    """Seconds of each prompt."""
    shares: list[float] = field(default_factory=list)
    """Shares of the read bandwidth, of all starts."""
    version: str = ""
    bytes_per_token: int = 0


def measure(
    programs: Mapping[str, Callable[[], Worker]], spinners: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All programs beside some spinners, in turns.

    Returns:
        A row for each: what was measured, its medians.
    """
    found = {name: Seconds() for name in programs}
    order = list(programs)
    for start in range(arguments.starts):
        random.Random(start).shuffle(order)
        workers = {name: programs[name]() for name in order}
        try:
            _start(workers, spinners, arguments, found)
        finally:
            for worker in workers.values():
                worker.close()
    return [_row(name, spinners, arguments, found) for name in programs]


def _start(
    workers: Mapping[str, Worker], spinners: int, arguments: argparse.Namespace, found: Mapping[str, Seconds]
) -> None:
    """All rounds of one start, added to what was found."""
    for name, worker in workers.items():
        found[name].version, found[name].bytes_per_token = worker.version, worker.bytes_per_token
        found[name].decode.append([])
        found[name].prefill.append([])
    with spinning(spinners):
        for number in range(arguments.rounds + 1):
            for name, worker in workers.items():
                seconds = worker.run("decode", arguments.tokens)
                prompt = [] if spinners else worker.run("prefill", arguments.prompt)
                if number:  # the first round warms up
                    # Beside others all of the time counts: a median would pass over tokens that were held up.
                    took = statistics.fmean(seconds) if spinners else statistics.median(seconds)
                    found[name].decode[-1].append(took)
                    found[name].prefill[-1] += prompt
            if number and not spinners:
                limit = read_bandwidth(None, fresh=True).gb_s * 1e9
                for name, worker in workers.items():
                    found[name].shares.append(worker.bytes_per_token / found[name].decode[-1][-1] / limit)


def _row(name: str, spinners: int, arguments: argparse.Namespace, found: Mapping[str, Seconds]) -> dict[str, Any]:
    """The medians of a program, and what it takes longer than another version and than without compensation."""
    own = found[name]
    decode, prefill = ([second for start in starts for second in start] for starts in (own.decode, own.prefill))
    row = {
        "program": name,
        "version": own.version,
        "spinners": spinners,
        "bytes_per_token": own.bytes_per_token,
        "decode_tokens_per_s": round(1 / statistics.median(decode), 1),
        "percent_of_read_bandwidth": round(100 * statistics.median(own.shares), 1) if own.shares else None,
        "prefill_tokens_per_s": round(arguments.prompt / statistics.median(prefill), 1) if prefill else None,
    }
    before, plain = found.get(name.replace(_OURS, _BEFORE, 1)), found[name.partition(",")[0]]
    if before is not None and before is not own:
        row["longer_than_before_percent"] = _longer(own.decode, before.decode)
        row["prefill_longer_than_before_percent"] = _longer(own.prefill, before.prefill) if prefill else None
    if plain is not own:
        row["longer_than_uncompensated_percent"] = _longer(own.decode, plain.decode)
    return row


def _longer(own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[float]:
    """What a program takes longer than another, of all starts: quartile, median and quartile in percent."""
    percent = [100 * (statistics.median(a) / statistics.median(b) - 1) for a, b in zip(own, other, strict=True)]
    return [round(float(value), 1) for value in np.quantile(percent, (0.25, 0.5, 0.75))]


_COLUMNS = {
    "longer_than_uncompensated_percent": "than without",
    "longer_than_before_percent": "than before",
    "prefill_longer_than_before_percent": "prefill than before",
}
"""Comparisons of a row, with their headings."""


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what was measured."""
    heads = "".join(f"{head:>26}" for head in _COLUMNS.values())
    print(f"{'':36}{'spinners':>9}{'MB a token':>12}{'decode t/s':>12}{'% of limit':>12}{'prefill t/s':>13}{heads}")
    for row in rows:
        numbers = [row["decode_tokens_per_s"], row["percent_of_read_bandwidth"], row["prefill_tokens_per_s"]]
        told = "".join(f"{'' if number is None else number:>12}" for number in numbers)
        more = [row.get(column) for column in _COLUMNS]
        told += "".join(f"{f'{q[1]:+.1f} ({q[0]:+.1f} to {q[2]:+.1f}) %' if q else '':>26}" for q in more)
        print(f"{row['program']:36}{row['spinners']:9}{row['bytes_per_token'] / 1e6:12.0f}{told}")


def main() -> None:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where make_gguf wrote its files; none: without llama.cpp")
    parser.add_argument("--stored", action="append", default=[], metavar="BITS=FOLDER")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--before", type=Path, metavar="TREE", help="checkout of another version, to compare with")
    parser.add_argument("--starts", type=int, default=1, help="times that all programs are started anew")
    parser.add_argument("--rounds", type=int, default=9, help="rounds after each start")
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens in a round")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--spinners", default="0", help="numbers of competing processes, with commas between")
    parser.add_argument("--model", help="what the results call it")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    stored = dict(entry.split("=", 1) for entry in arguments.stored)
    compared = programs(arguments.folder, stored, arguments.peer_python, arguments.before)
    rows = []
    for spinners in map(int, arguments.spinners.split(",")):
        rows += measure(compared, spinners, arguments)
    counts = " ".join(f"--{name} {getattr(arguments, name)}" for name in ("starts", "rounds", "tokens", "prompt"))
    options = f"{'FOLDER ' if arguments.folder else ''}{counts} --spinners {arguments.spinners}"
    options += " --before TREE" if arguments.before else ""
    weights = _OTHER if _shape_in(arguments.folder) else _LLAMA
    report = {
        "command": f"python -m tests.peers.compare {options}",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "model": arguments.model or (", ".join(stored.values()) if stored else weights),
        "cpu": detect_cpu().name,
        "cores": detect_cpu().physical_cores,
        "starts": arguments.starts,
        "rounds": arguments.rounds,
        "decoded_tokens_a_round": arguments.tokens,
        "prompt_tokens": arguments.prompt,
        "versions": {"python": platform.python_version(), "numba": importlib.metadata.version("numba")},
        **stamp(),
        "rows": rows,
    }
    print_table(rows)
    write_report(arguments.out, report)


if __name__ == "__main__":
    main()
