"""Kills the terminal UI and its runtime at random moments of a chat, and checks what remains.

    python -m tests.lab.killing --rounds 100 --out FILE.json

Each round starts the real program in a terminal, asks something, and kills with SIGKILL, at a random moment, the UI,
the runtime, or first the one and then the other. Then it looks: is the database whole, are all messages of earlier
rounds there unchanged, is the question there if it was sent a second before, does an answer bear another model's name
than the one that was asked, did a process stay? Rounds take turns between two stored models. The last round kills
nothing, and must be answered.
"""

from __future__ import annotations

import json
import os
import pty
import random
import select
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from assets import demo_path
from tests.lab.store import ROOMS, about_run, parser, write

HOMES = 4
MODELS = ("demo", "twin")
"""The bundled model, and a copy of it under another name."""
PAINTED = b"Ask anything"
KEPT_S = 1.0
"""What was sent so long before a kill must be there after it."""
LONGEST_S = 8.0
"""The latest moment of a kill after the question was sent."""
GONE_S = 30.0
"""How long a runtime may take to notice that its UI has gone."""
PATIENCE_S = 120.0


class Terminal:
    """The program in a terminal of its own; what it shows is read by a thread."""

    def __init__(self, home: Path, model: str) -> None:
        own = {"LOWBIT_CHAT_HOME": str(home), "LOWBIT_CHAT_MODEL": model, "TERM": "xterm-256color"}
        own |= {"LINES": "30", "COLUMNS": "100"}
        program = Path(sys.executable).with_name("lowbit-chat")
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(str(program), [str(program)], {**os.environ, **own})
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                select.select([self._terminal], [], [])
                self._shown = (self._shown + os.read(self._terminal, 1 << 16))[-(1 << 20) :]
            except OSError:
                return

    def wait_for(self, text: bytes) -> None:
        """Wait until a text has been shown."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._shown:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text.decode()!r} was not shown: {self._shown[-2000:]!r}")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type."""
        os.write(self._terminal, text.encode())

    def runtimes(self) -> list[psutil.Process]:
        """The processes that it has started."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End it at once, and leave the terminal."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._reader.join(PATIENCE_S)
        os.close(self._terminal)


@dataclass
class Found:
    """What all rounds left."""

    kept: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """State, role and text of every message, by id, after the round before."""
    broken: list[str] = field(default_factory=list)
    """What went wrong, in words."""

    def look(self, home: Path, asked: str, model: str, *, due: bool) -> None:
        """Look at the database after a round."""
        path = home / "history.db"
        with closing(sqlite3.connect(path)) as database:
            if database.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                self.broken.append(f"{asked}: the database is not whole")
            database.execute("INSERT INTO words (words) VALUES ('integrity-check')")
            rows = database.execute("SELECT id, parent, role, text, state, model FROM messages").fetchall()
            heads = [head for (head,) in database.execute("SELECT head FROM chats")]
        now = {number: (state, role, text) for number, _, role, text, state, _ in rows}
        self.broken += [f"{asked}: {self.kept[number]} was lost" for number in self.kept.keys() - now.keys()]
        for number in self.kept.keys() & now.keys():
            was, is_ = self.kept[number], now[number]
            if was[0] != "streaming" and was[1:] != is_[1:]:
                self.broken.append(f"{asked}: {was} became {is_}")
        self.broken += [
            f"{asked}: a message without its parent" for _, parent, *_ in rows if parent not in {None, *now}
        ]
        self.broken += [f"{asked}: a chat without its head" for head in heads if head not in {None, *now}]
        question = next((number for number, _, role, text, *_ in rows if role == "user" and asked in text), None)
        if due and question is None:
            self.broken.append(f"{asked}: the question was lost")
        for number, parent, role, _, _, named in rows:
            if number not in self.kept and role == "assistant" and parent == question and named not in (None, model):
                self.broken.append(f"{asked}: asked {model}, answered under the name of {named}")
        self.kept = now


def one_round(home: Path, number: int, rng: random.Random, found: Found) -> str:
    """Start, ask, kill, look. Returns what was killed."""
    asked, model = f"round {number}: tell me a story about the sea", MODELS[number % 2]
    terminal = Terminal(home, model)
    terminal.wait_for(PAINTED)
    time.sleep(rng.uniform(0, 1.5))
    runtimes = terminal.runtimes()
    terminal.type(f"{asked}\r")
    sent = time.monotonic()
    time.sleep(rng.uniform(0, LONGEST_S))
    victim = rng.choice(("UI", "runtime", "runtime, then UI"))
    runtimes = terminal.runtimes() or runtimes
    if victim != "UI":
        for process in runtimes:
            process.kill()
        time.sleep(rng.uniform(0, 2.0))
        runtimes = [*runtimes, *terminal.runtimes()]
    if victim == "runtime":
        time.sleep(2.0)  # the UI starts another one, and says so
        runtimes += terminal.runtimes()
    lived = time.monotonic() - sent
    terminal.kill()
    _, alive = psutil.wait_procs(runtimes, timeout=GONE_S)
    for process in alive:
        found.broken.append(f"round {number}: {process} was still there {GONE_S:g} s after the UI was killed")
        process.kill()
    found.look(home, asked, model, due=lived > KEPT_S)
    return victim


def last_round(home: Path, number: int, found: Found) -> None:
    """Ask, and wait for the answer."""
    asked, model = f"round {number}: hello", MODELS[number % 2]
    terminal = Terminal(home, model)
    terminal.wait_for(PAINTED)
    terminal.type(f"{asked}\r")
    deadline = time.monotonic() + PATIENCE_S
    answered = "SELECT answer.model FROM messages AS answer JOIN messages AS question ON answer.parent = question.id "
    answered += "WHERE question.text = ? AND answer.state = 'done'"
    row = None
    while row is None and time.monotonic() < deadline:
        time.sleep(0.2)
        with closing(sqlite3.connect(home / "history.db")) as database:
            row = database.execute(answered, (asked,)).fetchone()
    if row != (model,):
        found.broken.append(f"the last round was answered by {row}, not by {model}")
    runtimes = terminal.runtimes()
    terminal.kill()
    psutil.wait_procs(runtimes, timeout=GONE_S)
    found.look(home, asked, model, due=True)


def kill_at_random(home: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Do all rounds in a new home. Returns what was found."""
    rng, found, victims = random.Random(seed), Found(), Counter[str]()
    shutil.copytree(demo_path(), home / "models" / MODELS[1])
    for number in range(rounds):
        victims[one_round(home, number, rng, found)] += 1
    last_round(home, rounds, found)
    states = Counter(f"{role}, {state}" for state, role, _ in found.kept.values())
    return {"rounds": rounds, "killed": victims, "messages": states, "broken": found.broken}


def together(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was found in several homes."""
    first, *rest = found
    return {name: sum((one[name] for one in rest), first[name]) for name in first}


def main() -> None:
    """Kill, look and write."""
    options = parser(__doc__, "killing")
    options.add_argument("--rounds", type=int, default=100, help="how often")
    options.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(HOMES) as pool:
        rounds = [len(range(home, asked.rounds, HOMES)) for home in range(HOMES)]
        homes = [(Path(folder) / str(home), rounds[home], asked.seed + home) for home in range(HOMES)]
        found = together(pool.starmap(kill_at_random, homes))
    found = {**about_run("python -m tests.lab.killing", ("app", *ROOMS)), "seed": asked.seed, **found}
    write(asked.out, found)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    sys.exit(bool(found["broken"]))


if __name__ == "__main__":
    main()
