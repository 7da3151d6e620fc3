"""Two servers and the same clients: tokens a second with 1 to 16 requests in flight, beside llama.cpp's server.

    python -m tests.lab.servers NAME FILE.gguf --home FOLDER --peer llama-server --out FILE

NAME is a stored model of that home. Each server has 2 threads and is idle in the other's turns; all requests of a turn
come at once over HTTP, continue different texts of as many characters, and are streamed to their clients. Answers are
greedy and end where a model ends them, so tokens are counted as each server counts them.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from assets import evaluation_text
from tests.lab.soak import TOKEN, server
from tests.lab.store import about_run, columns, parser, write

FLIGHTS = (1, 2, 4, 8, 16)
PROMPT, ANSWER = 512, 128
CHARACTERS = 1950
"""Of a prompt: about 512 tokens of SmolLM2."""
PATIENCE_S = 600.0


class Answered(NamedTuple):
    """What one client saw."""

    first_s: float
    """Seconds until the first piece."""
    last_s: float
    """Seconds until the end."""
    prompt: int
    """Tokens of the prompt, as the server counts."""
    tokens: int
    """Tokens of the answer, as the server counts."""


@contextmanager
def llama_server(program: str, file: str, parallel: int) -> Iterator[str]:
    """llama.cpp's server, and its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = parallel * (PROMPT + ANSWER + 64)
    command = [program, "-m", file, "--port", str(port), "-np", str(parallel), "-c", str(context)]
    command += ["--threads", "2", "--threads-batch", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            base = f"http://127.0.0.1:{port}"
            until = time.monotonic() + PATIENCE_S
            while not _healthy(base):
                if child.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{program} did not start")
                time.sleep(0.2)
            yield f"{base}/v1"
        finally:
            child.terminate()


def _healthy(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health").status_code == 200
    except httpx.TransportError:
        return False


def prompts(count: int, rng: random.Random) -> list[str]:
    """Texts without a common beginning."""
    text = evaluation_text()
    places = [rng.randrange(len(text) - CHARACTERS) for _ in range(count)]
    return [f"{rng.randrange(1 << 30)} {text[at : at + CHARACTERS]}" for at in places]


async def ask(client: httpx.AsyncClient, model: str, prompt: str) -> Answered:
    """One request, read to its end."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.perf_counter(), None, None
    async with client.stream("POST", "/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{client.base_url}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                first = first or time.perf_counter() - began
                usage = chunk.get("usage") or usage
    last = time.perf_counter() - began
    if usage is None or first is None:
        raise SystemExit(f"{client.base_url} told no usage")
    return Answered(first, last, usage["prompt_tokens"], usage["completion_tokens"])


async def turn(base: str, model: str, texts: Sequence[str]) -> list[Answered]:
    """All requests at once."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(ask(client, model, text) for text in texts))


def summary(turns: Sequence[Sequence[Answered]]) -> dict[str, float]:
    """Of some turns of the same number of requests: the middle one by tokens a second."""

    def rate(answers: Sequence[Answered]) -> float:
        return sum(each.tokens for each in answers) / max(each.last_s for each in answers)

    middle = sorted(turns, key=rate)[len(turns) // 2]
    return {
        "tokens_per_s": rate(middle),
        "first_token_s": max(each.first_s for each in middle),
        "prompt_tokens": sum(each.prompt for each in middle) / len(middle),
        "answer_tokens": sum(each.tokens for each in middle) / len(middle),
    }


def compare(bases: dict[str, str], model: str, flights: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows by number in flight; servers take turns."""
    rng, rows = random.Random(0), []
    for base in bases.values():
        asyncio.run(turn(base, model, prompts(1, rng)))
    for count in flights:
        turns: dict[str, list[list[Answered]]] = {name: [] for name in bases}
        for _ in range(rounds):
            texts = prompts(count, rng)
            for name, base in bases.items():
                turns[name].append(asyncio.run(turn(base, model, texts)))
        found = {name: summary(each) for name, each in turns.items()}
        ratio = found["ours"]["tokens_per_s"] / found["llama.cpp"]["tokens_per_s"]
        rows.append({"in_flight": count, **found, "ratio": ratio})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Compare and write."""
    options = parser(__doc__, "servers")
    options.add_argument("model", metavar="NAME")
    options.add_argument("peer_model", metavar="FILE.gguf")
    options.add_argument("--home", type=Path, required=True)
    options.add_argument("--peer", required=True, help="llama.cpp's llama-server")
    options.add_argument("--flights", type=int, nargs="+", default=FLIGHTS)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    parallel = max(asked.flights)
    with (
        server(asked.model, asked.home, num_parallel=parallel) as (ours, _),
        llama_server(asked.peer, asked.peer_model, parallel) as theirs,
    ):
        rows = compare({"ours": ours, "llama.cpp": theirs}, asked.model, asked.flights, asked.rounds)
    print(columns([{"in_flight": row["in_flight"], "ratio": row["ratio"], **row["ours"]} for row in rows]))
    write(asked.out, {**about_run("python -m tests.lab.servers"), "model": asked.model, "rows": rows})


if __name__ == "__main__":
    main()
