"""Measures what docs/measurements.md shows, wherever it is older than the code, and writes the page.

    make measurements               or: python -m tests.lab.jobs; less than six hours on two cores, where all is old
    make measurements LIST=1        only says what is old, and about how long it takes
    make measurements ONLY=quality,caches SMOLLM2=FOLDER PEER_PYTHON=PYTHON LLAMA_SERVER=PROGRAM

Each result is a job: a command that fills a file, or a part of one, in `results`. A result is kept while neither the
folders whose code decides it nor its instrument have changed since the commit that it names, so a run that was stopped
goes on where it was: within quality, caches and tasks with the next number, elsewhere with the next job. What is
measured belongs to a commit, so the code has to be committed; results and pages need not be. Jobs that need a model, a
peer or texts that are not here are left out, with a line that says so. Interpreters with llama.cpp: see llama.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.measurements import PAGE, is_old, page, runs
from tests.lab.models import DATA
from tests.lab.store import RESULTS, ROOT, commit, listed, table, version
from tests.real_models import UnavailableError, gemma_file, hf_folder

BUILD = ROOT / "build" / "measured"
STORED = {"smollm2": 4, "smollm2-3": 3, "smollm2-16k": 4, "small": 4}
"""Stored models that jobs run, with their bits. What `smollm2-16k` was made of says 16,384 tokens of context;
`clients` asks `small`."""
_LONG = "--agent smollm2-16k --home {home} --tokens 12000 --compared 1 11 20"


@dataclass(frozen=True, slots=True)
class Job:
    """A result and the command that measures it."""

    file: str
    """The results file, without its ending."""
    minutes: int
    """About how long it takes on two cores of a server that does nothing else."""
    command: str
    """Behind `python -m tests.lab.`, with names of what it needs in braces (`Needs`)."""
    part: str = ""
    """Parts or sections of the file, with commas between; empty: all of it."""

    def __str__(self) -> str:
        return f"{self.file}: {self.part.replace(',', ', ')}".removesuffix(": ")

    def is_old(self) -> bool:
        """Whether it was not measured by this code."""
        found = runs(self.file, self.part)
        return not found or any(map(is_old, found))

    def words(self, needs: Needs) -> list[str]:
        """The command line.

        Raises:
            LackingError: something that it needs is not here.
        """
        module, *rest = (re.sub(r"{(\w+)}", lambda name: needs[name[1]], word) for word in shlex.split(self.command))
        out = [] if module == self.file else ["--out", str(RESULTS / f"{self.file}.json")]
        return [sys.executable, "-m", f"tests.lab.{module}", *rest, *out]


_STORED = "--smollm2 {smollm2} --stored 3={three} --stored 4={four}"
_SHAPES = {
    "1b": "a Llama shape of 1.1 billion parameters, random weights",
    "mixture": "a mixture of 64 experts of 768, 6 of 24 blocks, random weights",
    "qwen3.5": "Qwen3.5 4B, 8 of 32 blocks, random weights",
    "gemma3": "Gemma 3 1B, random weights",
}
_MIXTURES = {
    "lfm2-moe": "LFM2 8B-A1B, 4 of 24 blocks, random weights",
    "glm4-flash": "GLM-4.7-Flash, 3 of 47 blocks, random weights",
    "granite4-h": "Granite 4 h-tiny, 8 of 40 blocks, random weights",
}
_PEER = "--peer-python {peer}"
_CACHES = {"perplexity": 14, "steps": 6, "checks": 2, "size": 1, "memory": 5}
_SPECULATION = {"acceptance": 6, "memory": 4, "costs": 5, "speed": 3, "copied": 4, "heads": 2}
JOBS = (
    Job("start", 5, "start"),
    Job("tuned", 12, "tuned --smollm2 {smollm2} --models smollm2"),
    Job("peers-smollm2-starts", 7, f"compare {_STORED} --starts 8 --rounds 3"),
    Job("peers-1b-starts", 6, f"compare --starts 4 --rounds 3 --tokens 32 --prompt 128 --model '{_SHAPES['1b']}'"),
    Job("peers-smollm2", 6, f"compare {{peers}}/smollm2 {_STORED} {_PEER} --rounds 5"),
    *(
        Job(
            *(f"peers-{shape}", 6),
            f"compare {{peers}}/{shape} --shape {shape} {_PEER} --rounds 5 --tokens 32 --model '{title}'",
        )
        for shape, title in _SHAPES.items()
    ),
    *(
        Job(
            *(f"peers-{shape}", 3),
            f"compare {{peers}}/{shape} --shape {shape} {_PEER} --bits 4 --processor --rounds 3 --tokens 96 "
            f"--model '{title}'",
        )
        for shape, title in _MIXTURES.items()
    ),
    Job(
        *("peers-spinners", 5),
        f"compare {{peers}}/smollm2 {_STORED} {_PEER} --rounds 3 --tokens 32 --spinners 0,1,2,4",
    ),
    Job("servers", 5, "servers smollm2 {gguf} --home {home} --peer {server}"),
    Job("prompts", 6, "prompts --stored 'SmolLM2, 3 bits={three}' 'SmolLM2, 4 bits={four}' --tokens 64 512 4096"),
    Job("agent-short", 4, "prompts --agent smollm2 --home {home} --tokens 600"),
    Job("agent", 5, f"prompts {_LONG}"),
    Job("agent-fp16", 7, f"prompts {_LONG} --kv fp16"),
    *(
        Job("speculation", minutes, f"speculation --stored smollm2-4={{four}} --only {part} --one-thread", part)
        for part, minutes in _SPECULATION.items()
    ),
    *(Job("caches", minutes, f"caches --smollm2 {{smollm2}} --only {part}", part) for part, minutes in _CACHES.items()),
    Job("caches", 8, f"caches {_PEER} --only speed", "speed"),
    Job("tasks", 40, "tasks --smollm2 {smollm2}", "keys,chats,drift,forms"),
    Job(
        *("quality", 40, "quality --smollm2 {smollm2} --only full,points,qoq,budgets,answers"),
        "full,points,stored,qoq,budgets,answers",
    ),
    Job("quality", 10, f"quality --smollm2 {{smollm2}} --only peers,closeness {_PEER}", "peers,closeness"),
    Job("quality-gemma3", 20, f"quality --gemma {{gemma}} {_PEER}", "closeness"),
    Job("mixture", 8, "mixture --smollm2 {smollm2}"),
    Job("tool_calls", 4, "tool_calls {four}"),
    Job("kernels", 15, "kernels"),
    Job("products", 5, "kernels --products"),
    Job("installations", 1, "installations"),
    Job("clients", 10, "clients --home {home}"),
    Job("soak", 11, "soak"),
    Job("soak-two", 11, "soak --model smollm2 smollm2-16k --home {home} --clients 8"),
    Job("killing", 6, "killing"),
    Job("mutations", 30, "mutations"),
)
"""In this order: what needs a quiet machine, what takes long, what can fail for want of a network."""


class LackingError(Exception):
    """What a job needs is not here; the message says what that is."""


class Needs:
    """What commands name in braces; stored models are made when they are first asked for.

    Args:
        given: The command line: `smollm2`, `peer_python`, `llama_server`, and `list`, with which nothing is made.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given

    def __getitem__(self, name: str) -> str:
        return str(getattr(self, f"_{name}")())

    def _smollm2(self) -> Path:
        return _fetched(lambda: self._given.smollm2 or hf_folder(), ", or SMOLLM2=FOLDER")

    def _gemma(self) -> Path:
        return _fetched(gemma_file)

    def _peer(self) -> str:
        return _named(self._given.peer_python, "llama.cpp, an interpreter that has it: PEER_PYTHON=PYTHON")

    def _server(self) -> str:
        return _named(self._given.llama_server, "llama.cpp's server: LLAMA_SERVER=PROGRAM")

    def _peers(self) -> Path:
        return BUILD / "peers"

    def _gguf(self) -> str:
        file = self._peers() / "smollm2" / "Q4_K_M.gguf"
        return _named(str(file) if file.is_file() else None, "llama.cpp's file, which peers-smollm2 makes")

    def _home(self) -> Path:
        """A folder of the program with the models of `STORED`, as this code makes them."""
        home, source = BUILD / f"home-{version('models')}", self._smollm2()
        for name, bits in STORED.items():
            if self._given.list or (home / "models" / name).exists():
                continue
            folder = source
            if name.endswith("-16k"):
                folder = shutil.copytree(source, BUILD / name, dirs_exist_ok=True)
                sizes = json.loads((source / "config.json").read_text(encoding="utf-8"))
                (folder / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 16384}), "utf-8")
            program = str(Path(sys.executable).with_name("lowbit-chat"))
            asked = [program, "quantize", str(folder), "--bits", str(bits), "--name", name]
            subprocess.run(asked, env={**os.environ, "LOWBIT_CHAT_HOME": str(home)}, check=True)
        return home

    def _three(self) -> Path:
        return self._home() / "models" / "smollm2-3"

    def _four(self) -> Path:
        return self._home() / "models" / "smollm2"


def _fetched(find: Callable[[], Path], instead: str = "") -> Path:
    if not (DATA / "text").is_dir():
        raise LackingError("needs the texts of ../shared/data")
    try:
        return find()
    except UnavailableError as error:
        raise LackingError(f"{error}{instead}") from error


def _named(value: str | None, what: str) -> str:
    if value is None:
        raise LackingError(f"needs {what}")
    return value


def survey(jobs: Sequence[Job], needs: Needs) -> str:
    """Every result: whether it is of this code, about how many minutes it takes, and what it lacks here."""
    rows, total = list[Sequence[object]](), 0
    for job in jobs:
        lacks, old = "", job.is_old()
        try:
            job.words(needs)
        except LackingError as error:
            lacks = str(error)
        rows.append((job, f"{job.minutes} min" if old else "", lacks))
        total += job.minutes * (old and not lacks)
    return f"{table(('result', 'old', ''), rows)}\n{total // 60} h {total % 60:02} min for what can be measured here"


def measure(jobs: Sequence[Job], needs: Needs) -> list[str]:
    """Run the jobs whose results are old, and write the page after each.

    Returns:
        What went wrong.
    """
    wrong = list[str]()
    for job in jobs:
        if not job.is_old():
            continue
        try:
            words = job.words(needs)
        except (LackingError, subprocess.CalledProcessError) as error:
            print(f"{job}: left out: {error}", flush=True)
            continue
        print(f"{job}: about {job.minutes} minutes", flush=True)
        done = subprocess.run(words, cwd=ROOT, check=False)
        if done.returncode:
            wrong.append(f"{job}: ended with status {done.returncode}")
        elif job.is_old():
            wrong.append(f"{job}: some of it is still old")
        PAGE.write_text(page(), encoding="utf-8")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--list", action="store_true", help="measure nothing; say what is old")
    asked.add_argument("--only", type=listed, default=(), help="some results, by their files")
    asked.add_argument("--smollm2", type=Path, help="Hugging Face folder of SmolLM2-135M-Instruct; else it is fetched")
    asked.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    asked.add_argument("--llama-server", help="llama.cpp's server")
    given = asked.parse_args(arguments)
    unknown = set(given.only) - {job.file for job in JOBS}
    if unknown:
        asked.error(f"no result is called {', '.join(sorted(unknown))}; --list says what there is")
    jobs, needs = [job for job in JOBS if not given.only or job.file in given.only], Needs(given)
    if given.list:
        print(survey(jobs, needs))
        return 0
    if not commit() or commit().endswith("+"):
        print("What is measured belongs to a commit: commit the code, in a clone, and run this again.", file=sys.stderr)
        return 2
    try:
        wrong = measure(jobs, needs)
    except KeyboardInterrupt:
        print("\nStopped. Run the same again to go on.", file=sys.stderr)
        return 130
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
