"""Side by side with llama.cpp on this machine: the same shape, random weights, one run, programs taking turns.

    python -m tests.peers.make_gguf FOLDER
    python -m tests.peers.compare FOLDER --peer-python PATH --out tests/peers/results/NAME.json

Each round runs every program once, so that what else the machine does hits all alike; medians over the rounds. The
percentage is the bytes read for a token times tokens per second, over this machine's measured read bandwidth.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.bandwidth import read_bandwidth
from tuner.detect import detect_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one program did."""

    program: str
    version: str
    bytes_per_token: int
    decode_tokens_per_s: float
    percent_of_read_bandwidth: float
    prefill_tokens_per_s: float


class Worker:
    """A program in its own process."""

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "tests.peers.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
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
            raise SystemExit(f"a program under comparison ended early: {self._process.args}")
        return json.loads(line)


def main() -> None:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where make_gguf wrote its files")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens in a round")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    workers = {
        "lowbit-chat 4-bit": Worker(sys.executable, "ours", "4"),
        "lowbit-chat 3-bit": Worker(sys.executable, "ours", "3"),
        "lowbit-chat 3-bit, k_chunk 16": Worker(sys.executable, "ours", "3", "16"),
        "llama.cpp Q4_K_M": Worker(arguments.peer_python, "llama", str(arguments.folder / "Q4_K_M.gguf")),
        "llama.cpp Q3_K_M": Worker(arguments.peer_python, "llama", str(arguments.folder / "Q3_K_M.gguf")),
    }
    decode: dict[str, list[float]] = {name: [] for name in workers}
    prefill: dict[str, list[float]] = {name: [] for name in workers}
    bandwidths = []
    for number in range(arguments.rounds + 1):
        for name, worker in workers.items():
            seconds, prompt = worker.run("decode", arguments.tokens), worker.run("prefill", arguments.prompt)
            if number:  # the first round warms up
                decode[name].append(statistics.median(seconds))
                prefill[name] += prompt
        bandwidths.append(read_bandwidth(None, fresh=True).gb_s)
    for worker in workers.values():
        worker.close()
    limit = statistics.median(bandwidths)
    rows = []
    for name, worker in workers.items():
        rate = 1 / statistics.median(decode[name])
        rows.append(
            Row(
                program=name,
                version=worker.version,
                bytes_per_token=worker.bytes_per_token,
                decode_tokens_per_s=round(rate, 1),
                percent_of_read_bandwidth=round(100 * worker.bytes_per_token * rate / (limit * 1e9), 1),
                prefill_tokens_per_s=round(arguments.prompt / statistics.median(prefill[name]), 1),
            )
        )
    report = {
        "command": f"python -m tests.peers.compare FOLDER --rounds {arguments.rounds} --tokens {arguments.tokens}",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "cpu": detect_cpu().name,
        "cores": detect_cpu().physical_cores,
        "read_bandwidth_gb_s": round(limit, 1),
        "rounds": arguments.rounds,
        "decoded_tokens_a_round": arguments.tokens,
        "prompt_tokens": arguments.prompt,
        "versions": {"python": platform.python_version(), "numba": importlib.metadata.version("numba")},
        "rows": [asdict(row) for row in rows],
    }
    print(f"{'':32}{'MB a token':>12}{'decode t/s':>12}{'% of limit':>12}{'prefill t/s':>13}")
    for row in rows:
        print(
            f"{row.program:32}{row.bytes_per_token / 1e6:12.0f}{row.decode_tokens_per_s:12.1f}"
            f"{row.percent_of_read_bandwidth:12.1f}{row.prefill_tokens_per_s:13.1f}"
        )
    print(f"read bandwidth {limit:.1f} GB/s on {report['cpu']}, {report['cores']} cores")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
