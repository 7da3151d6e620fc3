"""Tool calls of a small model: how many are valid, how many are right, and whether prose stays prose.

    python -m tests.lab.tool_calls FOLDER

FOLDER is a stored model. A hundred requests, twenty for each of five tools, are answered greedily: once where a call
is required, once where the model decides (`auto`); and forty questions that need no tool, with the tools offered. As on
the server, a call that does not fit its schema is asked for once more. A call is valid if its name is a tool's and its
arguments fit the whole schema. It is right if the tool is the one that was asked for, and every argument that the
request names is as it names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from models.store import StoredModel
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions
from runtime.engine.engine import Engine
from runtime.server.openai.tool_call_retry import corrected
from runtime.text.call_grammar import CallRules
from runtime.text.call_reader import CallReader
from runtime.text.sampling import SamplingOptions
from runtime.text.schema_process import problem_of
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import Tool, ToolCall
from tests.lab.store import about_run, columns, parser, write

LONGEST, LONGEST_FREE = 200, 100
"""Most tokens of an answer that must call, and of one that may."""
ROOMS = ("runtime/text", "runtime/engine")


def _tool(name: str, words: str, required: Sequence[str], **properties: Mapping[str, Any]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name=name, description=words, parameters=schema)


TOOLS = (
    _tool(
        "get_weather",
        "The weather forecast of a city.",
        ["city"],
        city={"type": "string", "description": "Name of the city"},
        days={"type": "integer", "minimum": 1, "maximum": 14, "description": "Number of days"},
    ),
    _tool(
        "convert_currency",
        "Converts an amount of money to another currency.",
        ["amount", "source", "target"],
        amount={"type": "number"},
        source={"enum": ["EUR", "USD", "GBP", "JPY", "CHF"]},
        target={"enum": ["EUR", "USD", "GBP", "JPY", "CHF"]},
    ),
    _tool(
        "set_timer",
        "Starts a timer.",
        ["minutes"],
        minutes={"type": "integer", "minimum": 1},
        label={"type": "string", "pattern": "^(?!secret).{0,60}$", "description": "What the timer is for"},
    ),
    _tool(
        "search_files",
        "Searches a folder for files whose names contain a word.",
        ["folder", "word"],
        folder={"type": "string", "description": "Path of the folder"},
        word={"type": "string"},
    ),
    _tool(
        "send_message",
        "Sends a text message to a person.",
        ["to", "text"],
        to={"type": "string", "description": "First name of the person"},
        text={"type": "string", "description": "The message"},
    ),
)
CITIES = ("Paris", "Tokyo", "Lima", "Oslo", "Cairo", "Madrid", "Boston", "Sydney", "Nairobi", "Berlin")
PEOPLE = ("Anna", "Tom", "Maria", "Ben", "Julia", "Omar", "Kate", "Luis", "Nina", "Paul")
FOLDERS = ("/home/ann", "/tmp", "/var/log", "/srv/data", "/home/tom/docs")
WORDS = ("invoice", "holiday", "report", "backup", "recipe")
TEXTS = ("I am late.", "Happy birthday!", "Dinner is at eight.", "The train is here.")
PAIRS = (("EUR", "USD"), ("USD", "GBP"), ("GBP", "JPY"), ("CHF", "EUR"))
PROSE = (
    "Why is the sky blue?", "Tell me a joke.", "What is a verb?", "Who wrote Hamlet?", "Explain gravity to a child.",
    "What is the opposite of hot?", "Write a short poem about rain.", "What do bees eat?", "How do plants drink?",
    "What is 2 + 2?", "Name three colours.", "What is a haiku?", "Why do cats purr?", "What is democracy?",
    "Give me a synonym of happy.", "What is the capital of Italy?", "How does a bicycle stay up?", "What is love?",
    "Describe the sea.", "What is a prime number?", "Who was Ada Lovelace?", "Why do we sleep?", "What is bread?",
    "Tell me about dinosaurs.", "What is the largest planet?", "How do I make tea?", "What is a metaphor?",
    "Name a famous painter.", "Why are leaves green?", "What is an atom?", "How many legs has a spider?",
    "What makes people laugh?", "Explain what a computer is.", "What is a good name for a dog?", "Why is salt salty?",
    "What is the past tense of go?", "Tell me a story about a fox.", "What is friendship?", "How do magnets work?",
    "Say hello.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """A request, the tool that it needs, and the arguments that it names."""

    text: str
    tool: str
    named: Mapping[str, Any]


def requests() -> Iterator[Request]:
    """The hundred requests."""
    for city, days in islice(zip(cycle(CITIES), cycle((3, 5, 7)), strict=False), 20):
        yield Request(
            f"What will the weather be like in {city} for the next {days} days?",
            "get_weather",
            {"city": city, "days": days},
        )
    for (source, target), amount in islice(zip(cycle(PAIRS), cycle((10, 25, 99.5, 120, 4000)), strict=False), 20):
        named = {"amount": amount, "source": source, "target": target}
        yield Request(f"How much is {amount} {source} in {target}?", "convert_currency", named)
    for minutes, label in islice(
        zip(cycle((5, 10, 12, 45, 90)), cycle(("tea", "eggs", "laundry", "bread")), strict=False), 20
    ):
        yield Request(
            f"Set a timer of {minutes} minutes for the {label}.", "set_timer", {"minutes": minutes, "label": label}
        )
    for folder, word in islice(((folder, word) for folder in FOLDERS for word in WORDS), 20):
        yield Request(
            f"Search the folder {folder} for files with {word} in their name.",
            "search_files",
            {"folder": folder, "word": word},
        )
    for person, text in islice(zip(cycle(PEOPLE), cycle(TEXTS), strict=False), 20):
        yield Request(f'Send a message to {person} that says "{text}"', "send_message", {"to": person, "text": text})


def same(found: Any, named: Any) -> bool:
    """Whether an argument is as the request names it."""
    if isinstance(named, str):
        return isinstance(found, str) and found.strip(" .!").casefold() == named.strip(" .!").casefold()
    return isinstance(found, int | float) and float(found) == float(named)


class Asker:
    """Asks a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, text: str, *, required: bool) -> tuple[str, list[ToolCall], bool]:
        """The text and the calls of an answer, and whether it was asked for again because a call did not fit."""
        rules = CallRules.of(TOOLS, required=required, several=False)
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": text}]
        said, calls = self._answer(messages, rules)
        again = corrected(messages, rules, calls)
        if again is None:
            return said, calls, False
        return (*self._answer(*again), True)

    def _answer(self, messages: Sequence[Mapping[str, Any]], rules: CallRules) -> tuple[str, list[ToolCall]]:
        prompt = self.engine.chat_prompt(messages, tools=list(TOOLS))
        most = LONGEST if rules.required else LONGEST_FREE
        options = SamplingOptions(temperature=0, max_tokens=most, calls=rules)
        reader, said, calls = CallReader(TOOLS), "", list[ToolCall]()
        texts = [piece.text for piece in self.engine.generate(prompt, options)]
        for more, found in (*map(reader.feed, texts), reader.finish()):
            said, calls = said + more, calls + [one for one in found if isinstance(one, ToolCall)]
        return said, calls


def judge(request: Request, calls: Sequence[ToolCall]) -> dict[str, bool]:
    """What is true of an answer."""
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    call = calls[0] if calls else None
    valid = call is not None and problem_of(call.arguments, schemas[call.name]) is None
    arguments = json.loads(call.arguments) if call is not None else {}
    tool = call is not None and call.name == request.tool
    named = all(same(arguments.get(key), value) for key, value in request.named.items())
    return {"called": call is not None, "valid": valid, "tool": tool, "right": tool and named}


def measure(folder: Path, k_chunk: int) -> list[dict[str, Any]]:
    """Rows by kind of request."""
    model = StoredModel.open_folder(folder, folder.name)
    decoder = CpuDecoder(model, DecoderOptions(context=2048, slots=2, max_rows=256, k_chunk=k_chunk))
    ends = model.spec.eos_token_ids
    asker, rows = Asker(Engine(decoder, Tokenizer(folder), name=folder.name, eos_token_ids=ends)), []
    for name, required in (("required", True), ("auto", False)):
        judged = []
        for request in requests():
            text, calls, again = asker.ask(request.text, required=required)
            judged.append({**judge(request, calls), "again": again, "tool_asked": request.tool})
            print(name, judged[-1], request.text, calls or text[:80], flush=True)
        by_tool = {tool.name: sum(one["right"] for one in judged if one["tool_asked"] == tool.name) for tool in TOOLS}
        counts = {key: sum(one[key] for one in judged) for key in ("called", "valid", "tool", "right", "again")}
        rows.append({"kind": name, "requests": len(judged), **counts, "right_by_tool": by_tool})
    prose = [asker.ask(question, required=False)[1] for question in PROSE]
    rows.append({"kind": "prose", "requests": len(prose), "prose": sum(not calls for calls in prose)})
    return rows


def main() -> None:
    """Ask, print and store."""
    options = parser(__doc__, "tool_calls")
    options.add_argument("folder", type=Path)
    options.add_argument("--k-chunk", type=int, default=16)
    given = options.parse_args()
    rows = measure(given.folder, given.k_chunk)
    print(columns(rows))
    about = about_run("python -m tests.lab.tool_calls", ROOMS)
    write(given.out, {**about, "model": given.folder.name, "k_chunk": given.k_chunk, "rows": rows})


if __name__ == "__main__":
    main()
