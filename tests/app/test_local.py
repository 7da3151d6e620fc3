"""A model of this process answers as the same model behind HTTP does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client import RuntimeClient
from app.errors import ContextLengthError
from app.local import LocalRuntime
from app.protocol import ChatDelta, ChatOptions
from assets import demo_path
from models.store import StoredModel
from runtime.compensation import Compensation
from runtime.load.catalogue import Bundle
from runtime.load.loading import load
from runtime.load.plan import LoadOptions, plan_load
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.server.service import open_service
from runtime.wire.requests import LoadRequest
from tuner.profiles import ProfileStore

ASKED = [{"role": "user", "content": "Once upon a time"}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    asked = LoadOptions(compensation=Compensation(k_chunk=0), context=512, backend="cpu")
    plan = plan_load(StoredModel.open_folder(demo_path(), "demo"), asked)
    runtime = LocalRuntime(load(plan, profiles=ProfileStore(tmp_path), text=lambda: None))
    yield runtime
    await runtime.aclose()


@pytest.fixture
async def remote(tmp_path: Path) -> AsyncIterator[RuntimeClient]:
    service = open_service(tmp_path, Bundle(models={"demo": demo_path()}))
    request = LoadRequest(model="demo", k_chunk=0, context=512, backend="cpu")
    async with aclosing(service.load(request)) as reports:
        async for _ in reports:
            pass
    app = create_app(service, Security(token="t", management_token="t"))
    client = RuntimeClient("http://127.0.0.1", "t", transport=httpx.ASGITransport(app))
    yield client
    await client.aclose()
    assert service.close()


async def told(answer: Any) -> list[ChatDelta]:
    async with aclosing(answer) as deltas:
        return [delta async for delta in deltas]


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        (ASKED, {}),
        (ASKED, {"tools": [TOOL], "seed": 3, "temperature": 1.5}),
        ([*ASKED, {"role": "assistant", "content": "there was"}], {"continue_final": True}),
        (
            [
                *ASKED,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call00001", "content": "a house"},
            ],
            {"tools": [TOOL], "stop": ["house"]},
        ),
    ],
    ids=["plain", "tools", "continued", "called"],
)
async def test_a_conversation_gets_the_same_answer(
    local: LocalRuntime, remote: RuntimeClient, messages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    options = ChatOptions(**{**GREEDY, **more})
    ours, theirs = await told(local.chat(messages, options)), await told(remote.chat(messages, options))
    assert [(one.text, one.finish_reason, one.model) for one in ours] == [
        (one.text, one.finish_reason, one.model) for one in theirs
    ]
    assert [[(call.index, call.name, call.arguments) for call in one.calls] for one in ours] == [
        [(call.index, call.name, call.arguments) for call in one.calls] for one in theirs
    ]
    (mine, yours) = ours[-1].timings, theirs[-1].timings
    assert mine is not None
    assert yours is not None
    counted = [(one.prompt_tokens, one.completion_tokens, one.k_chunk, one.slowdown_percent) for one in (mine, yours)]
    assert counted[0] == counted[1]


async def test_a_text_is_continued_alike(local: LocalRuntime, remote: RuntimeClient) -> None:
    options = ChatOptions(temperature=0, max_tokens=20)
    answers = [await told(runtime.complete("The lamp ", options)) for runtime in (local, remote)]
    texts = ["".join(delta.text for delta in answer) for answer in answers]
    assert texts[0] == texts[1] != ""
    assert answers[0][-1].finish_reason == answers[1][-1].finish_reason == "stop"


async def test_an_answer_that_is_left_ends(local: LocalRuntime) -> None:
    answer = local.chat(ASKED, ChatOptions(temperature=0))
    await anext(answer)
    await anext(answer)
    await answer.aclose()
    assert local.loaded.engine.running == 0
    assert (await told(local.chat(ASKED, ChatOptions(**GREEDY))))[-1].finish_reason == "length"


async def test_a_prompt_that_is_too_long_is_refused_as_by_a_runtime(local: LocalRuntime) -> None:
    with pytest.raises(ContextLengthError, match="context holds 512"):
        await told(local.chat([{"role": "user", "content": "x " * 600}], ChatOptions()))
