"""Readers of chats: imported files, requests of the server, answers of an endpoint and of a server of tools."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import httpx
from hypothesis import strategies as st

from app.client import RuntimeClient
from app.conversation import Message, Statistics
from app.errors import ClientError, HistoryError
from app.history import exchange
from app.history.store import Chat, History
from app.printable import printable
from app.protocol import ChatOptions
from app.remote import RemoteClient
from app.tools import pipe as pipe_module
from app.tools import server as server_module
from app.tools.config import Secrets, ServerConfig, ToolsError
from app.tools.pipe import Log, Received, receive
from app.tools.server import Server
from app.tools.toolbox import model_name
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.wire.requests import InspectRequest
from tests.fuzz.mutation import addressed, altered_json, damaged, mostly, written
from tests.fuzz.reader import Reader

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "server"))
from fake_engine import make_service

# Files of chats

CHATGPT = {
    "title": "A talk",
    "create_time": 1700000000.5,
    "conversation_id": "c1",
    "current_node": "n3",
    "mapping": {
        "root": {"id": "root", "parent": None, "message": None, "children": ["n1"]},
        "n1": {"parent": "root", "message": {"author": {"role": "system"}, "content": {"parts": [""]}}},
        "n2": {
            "parent": "n1",
            "message": {"author": {"role": "user"}, "content": {"parts": ["hi", {}]}, "create_time": 1700000001},
        },
        "n3": {
            "parent": "n2",
            "message": {"author": {"role": "assistant"}, "content": {"parts": ["y"]}, "metadata": {"model_slug": "m"}},
        },
    },
}  # fmt: skip
MOMENTS = (
    *("2026-01-01T00:00:00", "0001-01-01T00:00:00+23:59", "9000-12-31T23:59:59.999999-23:59"),
    *("2026-02-30", "user", "assistant", "n2"),
)


def _own_chats() -> tuple[dict[str, Any], bytes]:
    """A chat as JSON, and one as Markdown in which every form of a turn occurs."""
    moment = exchange.moment_of("2026-11-22T10:42:00+01:00")
    texts = ("Show me", "```md\n## You\n```", "<b>\n", "> a\n- b\n  - c", "## You\n\n1. x")
    messages = [
        Message(
            id=f"m{at}",
            parent=f"m{at - 1}" if at else None,
            role="assistant" if at % 2 else "user",
            text=text,
            state=("done", "failed", "stopped")[at % 3],
            error="it broke" if at % 3 == 1 else None,
            model="demo" if at % 2 else None,
            statistics=Statistics(tokens=5, tokens_per_s=2.5, k_chunk={"qkv": 2}) if at % 2 else None,
            created=moment,
        )
        for at, text in enumerate(texts)
    ]  # fmt: skip
    chat = Chat(
        id="c", title="A *talk*", model="demo", pinned=False, created=moment, updated=moment, head=messages[-1].id
    )
    return exchange.document([exchange.to_json(chat, messages)]), exchange.to_markdown(chat, messages).encode()


@contextmanager
def history(folder: Path) -> Iterator[Reader]:
    """A file of chats, brought in as `chats import` does, listed and written out again."""
    own, markdown = _own_chats()
    number = 0

    def read(content: bytes) -> None:
        nonlocal number
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return  # the command says so itself
        chats = exchange.read(text, "chats")
        number += 1
        file = folder / f"{number}.db"
        kept = History(file)
        try:
            exchange.import_chats(kept, chats)
            kept.search("hi there")
            for chat in kept.chats():
                messages = kept.messages(chat.id)
                exchange.read(json.dumps(exchange.document([exchange.to_json(chat, messages)])), "chats")
                exchange.read(exchange.to_markdown(chat, messages), "chats")
        finally:
            kept.close()
            for left in folder.glob(f"{number}.db*"):
                left.unlink()

    inputs = mostly(altered_json(own, MOMENTS)) | altered_json([CHATGPT], MOMENTS) | damaged(markdown)
    inputs |= st.text(max_size=60).map(lambda text: markdown.replace(b"Show me", text.encode("utf-8", "replace")))
    yield Reader(sound=(written(own), written([CHATGPT]), markdown), inputs=inputs, read=read, errors=(HistoryError,))


# Requests

_FUNCTION = {
    "name": "f", "description": "x", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}  # fmt: skip
_SAMPLING = {
    "model": "small", "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "max_tokens": 8, "stream": False,
}  # fmt: skip
_SCHEMA = {
    "type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [1, "x"]}}, "required": ["a"],
}  # fmt: skip
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_ECHO = {"model": "small", "messages": [{"role": "user", "content": "echo"}]}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            **_SAMPLING,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "content": "22", "tool_call_id": "c1"},
                {"role": "user", "content": [{"type": "text", "text": "echo hi"}]},
            ],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "auto",
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_cache_key": "chat",
        },
        {
            **_SAMPLING,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "count 3"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        },
        {**_ECHO, "structured_outputs": {"regex": "a+b*"}},
        {**_ECHO, "structured_outputs": {"grammar": 'start: "a" | /b+/'}},
    ],
    "/v1/completions": [
        {**_SAMPLING, "prompt": "echo hi", "logprobs": 2, "structured_outputs": {"choice": ["a", "b"]}},
        {"model": "small", "prompt": [[1, 2, 3]], "stream": True},
    ],
    "/v1/responses": [
        {
            "model": "small",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "echo hi"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "metadata": {"a": "b"},
        },
        {"model": "small", "input": "count 3", "stream": True, "text": {"format": {"type": "json_object"}}},
    ],
    "/v1/messages": [
        {
            "model": "small",
            "max_tokens": 8,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "22"}]},
                        {"type": "text", "text": "echo hi"},
                    ],
                },
            ],
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "description": "x", "input_schema": _FUNCTION["parameters"]}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        {
            **_ECHO,
            "max_tokens": 8,
            "stream": True,
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ],
    "/v1/messages/count_tokens": [{**_ECHO, "system": "x"}],
    "/api/chat": [
        {
            "model": "small",
            "messages": [
                {"role": "user", "content": "hi", "images": ["eA=="]},
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "tool_name": "f", "content": "22"},
                {"role": "user", "content": "echo hi"},
            ],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "options": {"num_predict": 8, "temperature": 0.5, "seed": 1, "stop": ["x"], "num_ctx": 64, "mirostat": 0},
            "think": "low",
            "keep_alive": "1h30m",
        },
        {**_ECHO, "format": _SCHEMA, "stream": False, "logprobs": True, "top_logprobs": 2},
    ],
    "/api/generate": [
        {"model": "small", "prompt": "echo hi", "system": "x", "raw": True, "keep_alive": -1, "options": {"top_k": 3}},
        {"model": "small", "prompt": "echo hi", "format": "json", "suffix": "", "context": []},
    ],
    "/api/embed": [{"model": "small", "input": ["one", "two"], "truncate": True}],
    "/api/embeddings": [{"model": "small", "prompt": "one"}],
    "/api/show": [{"model": "small:latest"}],
    "/api/pull": [{"model": "owner/name:Q8_0", "stream": False}],
    "/v1/embeddings": [
        {"model": "small", "input": ["one", "two"], "encoding_format": "base64"},
        {"model": "small", "input": [[1, 2], [3]]},
    ],
}  # fmt: skip
ASKED = [
    *(
        json.loads(line)
        for line in r"""
{"type": "string", "pattern": "(a+)+$"}
{"$ref": "#"}
{"allOf": [{"$ref": "#"}]}
{"type": ["integer", "null"], "minimum": 1e308}
{"anyOf": []}
{"const": null}
{"type": "array", "minItems": 1000000000}
{"multipleOf": 0}
{"format": "x"}
{"enum": []}
""".strip().splitlines()
    ),
    *("((((a{1,99}){1,99}){1,99}){1,99})", "[", "(?=a)", "\\p{L}{1000}"),
    *('start: a\na: a "b" | ""', "start: /(/", "%ignore /a*/"),
    *("assistant", "tool", "function", "required", "json_schema", "umlauts", "count 9", "a" * 40_000),
]


@contextmanager
def requests(folder: Path) -> Iterator[Reader]:
    """Bodies of requests, asked of the server's application with a model that needs no weights."""
    del folder
    logger = logging.getLogger("runtime")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what is logged is found by its status
    service, _ = make_service()
    app = create_app(service, Security())
    transport = httpx.ASGITransport(app)
    runner = asyncio.Runner()

    async def ask(path: str, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            return await client.post(path, content=body, headers=headers)

    def read(content: bytes) -> None:
        path, _, body = content.partition(b"\n")
        answer = runner.run(ask(path.decode(), body))
        assert answer.status_code in (200, 400, 404, 413, 503), answer.text[:300]
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert 0 < len(error if isinstance(error, str) else error["message"]) < 2000, answer.text[:3000]

    sound = tuple(f"{path}\n".encode() + written(body) for path, bodies in REQUESTS.items() for body in bodies)
    inputs = [
        addressed(path, mostly(altered_json(body, ASKED))) for path, bodies in REQUESTS.items() for body in bodies
    ]
    yield Reader(sound=sound, inputs=st.one_of(inputs), read=read, errors=())
    logger.setLevel(level)
    runner.close()
    assert service.close(), "the engine's thread ends"


# Answers

MODELS = {"object": "list", "data": [{"id": "big", "max_model_len": 32768}, {"id": "small"}]}
_CHOICE = {"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}
EVENTS = [
    {"id": "1", "model": "big", "choices": [_CHOICE]},
    {
        "model": "big",
        "choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}],
        "timings": {"predicted_ms": 5.0},
    },
    {"choices": [], "usage": {"prompt_tokens": 3}},
]
_ERROR = {"message": "too long for the context size", "type": "invalid_request_error"}
FAILURE = {"error": {**_ERROR, "param": "messages", "code": "overloaded"}}
INSPECTED = [
    {"phase": "read", "done": 1, "total": 2, "unit": "tokens", "message": "reads"},
    {
        "phase": "done",
        "model": "m",
        "compensated": True,
        "tokens": [{"text": "a", "candidates": [{"text": "a", "logit": 1.0, "probability": 0.5}], "chosen": 0}],
    },
]
STATUS = {"state": "ready", "model": "big", "backend": "cpu", "bits": 3.5, "k_chunk": {"qkv": 2}, "context": 64}


def as_stream(events: bytes) -> bytes:
    """A list of events as a server sends them, or whatever it is as it is."""
    try:
        found = json.loads(events)
    except (ValueError, RecursionError):
        return b"data: " + events + b"\n\n"
    items = found if isinstance(found, list) else [found]
    return b"".join(b"data: " + written(item) + b"\n\n" for item in items) + b"data: [DONE]\n\n"


@contextmanager
def stream(folder: Path) -> Iterator[Reader]:
    """What an endpoint, and the runtime, answer; the first line says to what, with which status and in which pieces."""
    del folder
    runner = asyncio.Runner()
    usual = {"/v1/models": written(MODELS), "/v1/chat/completions": as_stream(written(EVENTS))}
    usual |= {"/runtime/inspect": as_stream(written(INSPECTED)), "/runtime/status": written(STATUS)}

    async def ask(path: str, status: int, size: int, content: bytes) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path != path:
                return httpx.Response(200, content=usual[request.url.path])

            async def pieces() -> AsyncIterator[bytes]:
                for at in range(0, len(content), size):
                    yield content[at : at + size]

            return httpx.Response(status, content=pieces())

        transport = httpx.MockTransport(answer)
        own = path.startswith("/runtime")
        client = (
            RuntimeClient("http://gpu", "t", transport=transport)
            if own
            else RemoteClient("http://gpu/v1", "", transport=transport)
        )
        try:
            await client.status()
            if own:
                request = InspectRequest(model="big", messages=(), answer="x")
                _ = [report async for report in client.inspect(request)]
            else:
                await client.models()
                async for delta in client.chat([{"role": "user", "content": "hi"}], ChatOptions()):
                    delta.text.encode()
                    (delta.model or "").encode()
        finally:
            await client.aclose()

    def read(content: bytes) -> None:
        head, _, body = content.partition(b"\n")
        path, status, size = head.decode().split()
        runner.run(ask(path, int(status), int(size), body))

    sound = tuple(f"{path} 200 7\n".encode() + content for path, content in usual.items())
    kinds = {
        "/v1/models": altered_json(MODELS, ("big", {"data": []})),
        "/v1/chat/completions": altered_json(EVENTS, (FAILURE, *EVENTS)).map(as_stream)
        | damaged(usual["/v1/chat/completions"]),
        "/runtime/inspect": altered_json(INSPECTED, (*INSPECTED, FAILURE)).map(as_stream),
        "/runtime/status": altered_json(STATUS),
    }
    inputs = [addressed(f"{path} 200 {size}", mostly(made)) for path, made in kinds.items() for size in (7, 1 << 16)]
    refused = st.sampled_from([f"{path} {status} 99" for path in kinds for status in (400, 401, 404, 503, 307, 204)])
    inputs.append(refused.flatmap(lambda head: addressed(head, altered_json(FAILURE))))
    yield Reader(sound=sound, inputs=st.one_of(inputs), read=read, errors=(ClientError,))
    runner.close()


# Answers of a server of tools

_INITIALIZED = {
    "protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}, "prompts": {}, "resources": {}},
    "serverInfo": {"name": "s", "version": "1"},
}  # fmt: skip
_TOOL = {
    "name": "read_file", "title": "Read", "description": "Reads a file.",
    "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "annotations": {"readOnlyHint": True},
}  # fmt: skip
_CONTENTS = [
    {"type": "text", "text": "hello"},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"type": "resource_link", "name": "n", "uri": "memo://one"},
    {"type": "resource", "resource": {"uri": "memo://one", "text": "Buy milk."}},
]
RESULTS: dict[str, dict[str, Any]] = {
    "initialize": _INITIALIZED,
    "tools/list": {"tools": [_TOOL, {**_TOOL, "name": "a/b"}], "nextCursor": ""},
    "prompts/list": {"prompts": [{"name": "tone", "description": "x", "arguments": [{"name": "a", "required": True}]}]},
    "resources/list": {"resources": [{"uri": "memo://one", "name": "memo"}]},
    "tools/call": {"content": _CONTENTS, "structuredContent": {"a": 1}, "isError": False},
    "prompts/get": {"messages": [{"role": "user", "content": _CONTENTS[0]}]},
    "resources/read": {"contents": [{"uri": "memo://one", "text": "Buy milk."}]},
}
_ODD = [_TOOL, *_CONTENTS, _INITIALIZED, {"method": "notifications/tools/list_changed"}, {"method": "ping", "id": 1}]


class _Scripted(Server):
    """A server whose answers are given; each goes through the reader of lines."""

    def __init__(self, config: ServerConfig, answers: Mapping[str, bytes]) -> None:
        super().__init__(config, Secrets([config]), lambda: None)
        self._answers = answers

    @asynccontextmanager
    async def _transport(self, log: Log) -> AsyncIterator[Any]:
        arrived, read = anyio.create_memory_object_stream[Any](0)
        write, waiting = anyio.create_memory_object_stream[Any](0)
        stream, received = asyncio.StreamReader(limit=1 << 26), Received(arrived, log)

        async def answer() -> None:
            async for one in waiting:
                received.ask(one.message)
                if (number := getattr(one.message, "id", None)) is not None and hasattr(one.message, "method"):
                    line = self._answers.get(one.message.method, b"{}").replace(b'"@"', str(number).encode())
                    stream.feed_data(line.replace(b"\n", b" ") + b"\n")

        tasks = [asyncio.create_task(answer()), asyncio.create_task(receive(stream, received))]
        try:
            yield read, write
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (arrived, read, write, waiting):
                end.close()


@contextmanager
def tools(folder: Path) -> Iterator[Reader]:
    """What a server of tools answers, in every request that this program makes; the first line says to which."""
    del folder
    runner = asyncio.Runner()
    config = ServerConfig(name="s", command="x", env={"KEY": "s3cr3t-value"})
    sound = {method: written({"jsonrpc": "2.0", "id": "@", "result": result}) for method, result in RESULTS.items()}

    async def ask(method: str, content: bytes) -> None:
        server = _Scripted(config, {**sound, method: content})
        server.start()
        while server.state == "starting":  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.001)
        shown = [server.problem, *server.notes, *(tool.description for tool in server.tools)]
        try:
            for tool in server.tools:
                json.dumps(dict(tool.schema)).encode()
                assert re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", model_name("s", tool.name)), tool.name
            if server.state == "ready" and server.tools:
                shown.append((await server.call(server.tools[0], {"path": "x"}, shown.append)).text)
            if server.state == "ready":
                shown += [await server.prompt("tone", {}), await server.resource("memo://one")]
        finally:
            await server.close()
            server.log.encode()
            for text in shown:
                assert printable(text) == text, "what is shown is safe to show"

    def read(content: bytes) -> None:
        method, _, line = content.partition(b"\n")
        runner.run(ask(method.decode(), line))

    kinds = [addressed(method, altered_json(json.loads(line), _ODD) | damaged(line)) for method, line in sound.items()]
    with (
        patch.multiple(server_module, START_S=0.2, LIST_S=0.2, CALL_S=0.2),
        patch.object(pipe_module, "GARBLED_S", 0.05),
    ):
        yield Reader(
            sound=tuple(f"{method}\n".encode() + line for method, line in sound.items()),
            inputs=st.one_of(kinds),
            read=read,
            errors=(ToolsError,),
        )
    runner.close()
