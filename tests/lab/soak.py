"""Many clients at a real server for minutes: is every request answered or refused, and does memory stay flat?

    python -m tests.lab.soak --minutes 10 [--model NAME ... --home FOLDER --clients 12]

Clients come at random with prompts and answers of random lengths, many with a common beginning; some stop reading in
the middle of a stream, some hang up before the first word, some ask what cannot be. The server's memory is read each
second. When all clients have gone, the server has to answer one more request that may take the whole context.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import psutil

from tests.lab.store import ROOMS, about_run, parser, write

TOKEN = "secret"
BEGINNINGS = [" ".join(["The keeper of the lighthouse", "walked to the sea and back"] * 12 * (i + 1)) for i in range(3)]
"""What prompts have in common."""
MIB = 1 << 20


@dataclass
class Seen:
    """What clients saw, and what the server took."""

    ends: Counter[str] = field(default_factory=Counter)
    """How requests ended."""
    wrong: list[str] = field(default_factory=list)
    """What should not be."""
    firsts: list[float] = field(default_factory=list)
    """Seconds to the first piece of a stream."""
    memory: list[tuple[float, float, int]] = field(default_factory=list)
    """Seconds since the start, MiB of the server, requests that have ended."""


@contextmanager
def server(model: str, home: Path, **settings: object) -> Iterator[tuple[str, psutil.Process]]:
    """The program's own `serve` with some settings, and its base URL."""
    program = Path(sys.executable).with_name("lowbit-chat")
    command = [str(program), "serve", "--model", model, "--port", "0", "--token", TOKEN]
    own = {f"LOWBIT_CHAT_{key.upper()}": str(value) for key, value in settings.items()}
    environment = {"LOWBIT_CHAT_HOME": str(home), **own}
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=told, env={**psutil.Process().environ(), **environment}
        ) as child,
    ):
        try:
            while not (found := re.search(r"serving (\S+?);", _text(told))):
                if child.poll() is not None:
                    raise SystemExit(f"the server did not start: {_text(told)}")
                time.sleep(0.2)
            yield found[1], psutil.Process(child.pid)
        finally:
            child.terminate()


def _text(told: IO[str]) -> str:
    """All that a program has written so far."""
    told.seek(0)
    return told.read()


async def ask(client: httpx.AsyncClient, models: Sequence[str], rng: random.Random, seen: Seen) -> None:
    """One request of a client that may go at any moment."""
    text = rng.choice(BEGINNINGS)[: rng.randrange(1, 2000)] if rng.random() < 0.7 else ""
    text += " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 60)))
    body: dict[str, Any] = {
        "model": rng.choice(models) if rng.random() < 0.98 else "nobody",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": rng.randrange(1, 80),
        "temperature": rng.choice((0, 0.7, 1)),
        "seed": rng.randrange(1000),
        "stream": rng.random() < 0.7,
    }
    patience = rng.choice((None, None, None, 0.01, 0.1, 0.5, 2.0))
    try:
        seen.ends[await asyncio.wait_for(_answered(client, body, rng, seen), patience)] += 1
    except TimeoutError:
        seen.ends["hung up"] += 1


async def _answered(client: httpx.AsyncClient, body: dict[str, Any], rng: random.Random, seen: Seen) -> str:
    """How a request ended, in a word."""
    leaves, began = rng.randrange(1, 40) if rng.random() < 0.15 else 1 << 30, time.monotonic()
    async with client.stream("POST", "/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            error = json.loads(await answer.aread())["error"]
            if (answer.status_code >= 500 and answer.status_code != 503) or not error["message"]:
                seen.wrong.append(f"{answer.status_code}: {error}")
            return f"refused, {answer.status_code}"
        if not body["stream"]:
            return str(json.loads(await answer.aread())["choices"][0]["finish_reason"])
        last, lines = None, 0
        async for line in answer.aiter_lines():
            lines += 1
            if lines > leaves:
                return "left in the middle"
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                if last is None and choices and choices[0]["delta"].get("content"):
                    seen.firsts.append(time.monotonic() - began)
                    last = ""
                last = (choices[0]["finish_reason"] if choices else None) or last
        if not last:
            seen.wrong.append("a stream without an end")
        return str(last)


async def visit(
    url: str, models: Sequence[str], clients: int, seconds: float, process: psutil.Process, seed: int
) -> Seen:
    """Let clients come and go for so long."""
    rng, seen, began = random.Random(seed), Seen(), time.monotonic()

    async def come_and_go(own: random.Random) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
            while time.monotonic() - began < seconds:
                await ask(client, models, own, seen)
                await asyncio.sleep(own.expovariate(2))

    async def watch() -> None:
        while True:
            taken = process.memory_info().rss / MIB
            seen.memory.append((round(time.monotonic() - began, 1), round(taken, 1), seen.ends.total()))
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(come_and_go(random.Random(rng.random())) for _ in range(clients)))
    watching.cancel()
    return seen


def last_request(url: str, model: str) -> str:
    """How a request for the whole context ends once all others are gone."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"model": model, "messages": [{"role": "user", "content": "Tell a story"}], "temperature": 0}
    with httpx.Client(base_url=url, headers=headers, timeout=600) as client:
        answer = client.post("/chat/completions", json=body)
    return str(answer.json()["choices"][0]["finish_reason"]) if answer.status_code == 200 else answer.text


def planned(url: str) -> float:
    """MiB of weights and caches of the loaded models, as the server tells them."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    told = httpx.get(f"{url.removesuffix('/v1')}/api/ps", headers=headers).json()["models"]
    return float(sum(model["size"] for model in told)) / MIB


def growth(memory: list[tuple[float, float, int]]) -> float:
    """MiB a minute by which memory rises over the second half, by least squares."""
    half = [(at / 60, taken) for at, taken, _ in memory[len(memory) // 2 :]]
    if len(half) < 2:
        return 0.0
    return float(np.polyfit([at for at, _ in half], [taken for _, taken in half], 1)[0])


def soaked(models: Sequence[str], home: Path, minutes: float, clients: int, parallel: int, seed: int) -> dict[str, Any]:
    """Everything that a run found."""
    with server(models[0], home, num_parallel=parallel) as (url, process):
        seen = asyncio.run(visit(url, models, clients, 60 * minutes, process, seed))
        held, last = planned(url), last_request(url, models[0])
    wrong = seen.wrong + ([] if last in ("stop", "length") else [f"the last request: {last}"])
    return {
        "model": ", ".join(models),
        "clients": clients,
        "parallel": parallel,
        "requests": seen.ends.total(),
        "ends": dict(seen.ends.most_common()),
        "wrong": wrong,
        "first_s": {share: round(float(np.quantile(seen.firsts, share)), 3) for share in (0.5, 0.95, 1.0)},
        "planned_mib": round(held, 1),
        "growth_mib_per_minute": round(growth(seen.memory), 3),
        "memory": seen.memory,
    }


def main() -> None:
    """Soak, and write it down."""
    options = parser(__doc__, "soak")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--model", nargs="+", default=["demo"])
    options.add_argument("--home", type=Path, help="the program's folder; a new one if not given")
    options.add_argument("--clients", type=int, default=12)
    options.add_argument("--parallel", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = asked.home or Path(folder)
        found = soaked(asked.model, home, asked.minutes, asked.clients, asked.parallel, asked.seed)
    found = {**about_run("python -m tests.lab.soak", ("app", *ROOMS)), **found}
    write(asked.out, found)
    print(json.dumps({key: value for key, value in found.items() if key != "memory"}, indent=1))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
