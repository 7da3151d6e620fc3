"""Time to the first token: with and without compensation of the prompt, or turn by turn as an agent waits for it.

    python -m tests.lab.prompts --stored NAME=FOLDER --tokens 512 4096
    python -m tests.lab.prompts --agent NAME --home FOLDER --tokens 12000 --out FILE

Compensated and not, on stored models and the 1.1-billion shape, take turns on one decoder; what counts is the median of
the ratios of neighbours in time.

An agent sends so many tokens of tools and instructions, then 20 turns: each has the answers before it, and results of
the tools that these called. The server is stopped and started again in the middle. Then some turns are asked once more
of a model that was loaded anew and has no saved caches, to compare the answers, which are greedy: where they part, how
much likelier the token is that comes from nothing.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from assets import evaluation_text
from models.packed import Weights
from runtime.backends.cpu.backend import CpuBackend
from runtime.backends.decoder import DecoderOptions
from runtime.budget.prompt_tuning import PromptTimer
from runtime.load.plan import open_decoder
from tests.lab.measure import in_turns, longer
from tests.lab.models import RandomModel, llama_1b, opened
from tests.lab.soak import TOKEN, server
from tests.lab.store import about_run, columns, parser, write

TURNS, ANSWER = 20, 48
LIKELIEST = 5
"""Tokens of each place whose logarithms are asked for."""
CHARACTERS = 1000
"""Of a tool's description: 250 tokens of English, with its schema about 300."""


def measured(name: str, model: Weights, tokens: int, rounds: int) -> dict[str, Any]:
    """Time a prompt both ways."""
    options = DecoderOptions(context=tokens, k_chunk=0, prompt_k_chunk=1024, max_rows=CpuBackend.step_rows[0])
    decoder, _ = open_decoder(model, options, "cpu")
    timer = PromptTimer(decoder)
    timer.tokens = tokens
    with decoder.session():
        times = in_turns({how: lambda h=how: timer.seconds(compensate=h) for how in (False, True)}, rounds)
    decoder.close()
    without, with_it = times[False], times[True]
    slowdown = longer(with_it, without)[1]
    medians = {"without_s": statistics.median(without), "with_s": statistics.median(with_it)}
    return {"model": name, "tokens": tokens, "rows": options.max_rows, **medians, "slowdown_percent": slowdown}


def tools(tokens: int) -> list[Any]:
    """Tools whose descriptions take about so many tokens."""
    text = 2 * evaluation_text()
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    functions = [
        {
            "name": f"tool_{at}",
            "description": text[397 * at % (len(text) // 2) :][:CHARACTERS],
            "parameters": parameters,
        }
        for at in range(tokens // 300)
    ]
    return [{"type": "function", "function": own} for own in functions]


class Agent:
    """A client with tools."""

    def __init__(self, model: str, tokens: int) -> None:
        self._model, self._tools = model, tools(tokens)

    def ask(self, base: str, messages: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Answer a conversation: the message, and what was measured."""
        text, calls, first, usage, chosen = "", list[dict[str, Any]](), None, None, list[Any]()
        begin = time.perf_counter()
        with openai.OpenAI(base_url=base, api_key=TOKEN, timeout=3600, max_retries=0) as client:
            for chunk in client.chat.completions.create(
                model=self._model,
                messages=messages,
                tools=self._tools,
                temperature=0,
                max_tokens=ANSWER,
                logprobs=True,
                top_logprobs=LIKELIEST,
                stream=True,
                stream_options={"include_usage": True},
            ):
                delta, usage = chunk.choices[0].delta if chunk.choices else None, chunk.usage or usage
                if chunk.choices and chunk.choices[0].logprobs is not None:
                    chosen += chunk.choices[0].logprobs.content
                if delta is None or not (delta.content or delta.tool_calls):
                    continue
                first, text = first or time.perf_counter() - begin, text + (delta.content or "")
                for call in delta.tool_calls or ():
                    if call.id:
                        function = {"name": call.function.name, "arguments": ""}
                        calls.append({"id": call.id, "type": "function", "function": function})
                    calls[-1]["function"]["arguments"] += call.function.arguments or ""
        told = {"prompt": usage.prompt_tokens, "cached": usage.prompt_tokens_details.cached_tokens}
        answer = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        return answer, {**told, "first_s": round(first or time.perf_counter() - begin, 3), "chosen": chosen}

    def hold(self, base: str, **more: int) -> None:
        """Load the model, or unload it with `keep_alive=0`, which saves its caches."""
        headers, place = {"Authorization": f"Bearer {TOKEN}"}, base.removesuffix("/v1")
        with httpx.Client(base_url=place, headers=headers, timeout=60) as client:
            client.post("/api/generate", json={"model": self._model, **more}).raise_for_status()


def apart(fresh: Sequence[Any], other: Sequence[Any]) -> float | None:
    """Where two answers first differ: nats by which the other's token is less likely to `fresh` than its own.

    At least as many as its last listed token, if the other's isn't listed; None: they don't differ.
    """
    for own, others in zip(fresh, other, strict=False):
        if own.token != others.token:
            listed = {one.token: one.logprob for one in own.top_logprobs}
            return round(own.logprob - listed.get(others.token, min(listed.values())), 3)
    return None


def text_of(answer: dict[str, Any]) -> str:
    """An answer without the ids of its calls."""
    return json.dumps([answer["content"], [call["function"] for call in answer.get("tool_calls", ())]])


def conversation(model: str, home: Path, tokens: int, kv: str, compared: Sequence[int]) -> list[dict[str, Any]]:
    """Every turn of an agent: seconds to its first token, and of compared ones those from nothing."""
    agent, text, saved = Agent(model, tokens), evaluation_text(), home / "cache" / "chats"
    messages: list[Any] = [{"role": "system", "content": f"You are an agent. {text[:2000]}"}]
    asked, rows = [], []
    settings = {"kv": kv, "context": tokens + 4000}
    shutil.rmtree(saved, ignore_errors=True)
    for half in range(2):
        with server(model, home, **settings) as (base, _):
            agent.hold(base)
            for turn in range(half * TURNS // 2, (half + 1) * TURNS // 2):
                said = text[200 * turn :][:200]
                if messages[-1]["role"] != "tool":
                    messages.append({"role": "user", "content": said})
                asked.append(list(messages))
                answer, row = agent.ask(base, messages)
                rows.append({"turn": turn + 1, "restarted": bool(half), **row, "answer": text_of(answer)})
                print(f"{turn + 1}: {row['first_s']} s", flush=True)
                results = [{"role": "tool", "tool_call_id": call["id"], "content": said}
                           for call in answer.get("tool_calls", ())]  # fmt: skip
                messages += [answer, *results]
    with server(model, home, **settings) as (base, _):
        for row, before in zip(rows, asked, strict=True):
            answered, chosen = row.pop("answer"), row.pop("chosen")
            if row["turn"] not in compared:
                continue
            agent.hold(base, keep_alive=0)
            shutil.rmtree(saved, ignore_errors=True)
            agent.hold(base)
            answer, fresh = agent.ask(base, before)
            assert fresh["cached"] == 0, fresh
            row |= {"fresh_s": fresh["first_s"], "same": answered == text_of(answer)}
            row["apart"] = apart(fresh["chosen"], chosen)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, print and store."""
    options = parser(__doc__, "prompts")
    options.add_argument("--agent", metavar="NAME", help="a stored model of that home, for the turns of an agent")
    options.add_argument("--home", type=Path)
    options.add_argument("--stored", nargs="*", default=[], metavar="NAME=FOLDER")
    options.add_argument("--tokens", nargs="+", type=int, default=[512, 4096])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--kv", default="int4")
    options.add_argument("--compared", nargs="+", type=int, default=range(1, TURNS + 1), metavar="TURN")
    given = options.parse_args()
    if given.agent:
        rows = conversation(given.agent, given.home, given.tokens[0], given.kv, given.compared)
        print(columns(rows))
        write(
            given.out, {**about_run("python -m tests.lab.prompts"), "model": given.agent, "kv": given.kv, "rows": rows}
        )
        return
    shape = ("1.1 B shape, 3 bits", RandomModel(llama_1b(8192), 3))
    models: list[tuple[str, Weights]] = [*opened(given.stored), shape]
    rows = [measured(name, model, tokens, given.rounds) for name, model in models for tokens in given.tokens]
    print(columns(rows))
    write(given.out, {**about_run("python -m tests.lab.prompts"), "rows": rows})


if __name__ == "__main__":
    main()
