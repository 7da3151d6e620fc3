"""The official client, unchanged, against a real server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import openai
import pytest
from fake_engine import FakeHouse

from runtime.server.service import Service
from tests.runtime.server.conftest import wait_until

HELLO = [{"role": "user", "content": "echo hello there"}]


@pytest.fixture
def client(serve: Callable[..., object]) -> Iterator[openai.OpenAI]:
    server = serve(token="secret")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:  # type: ignore[attr-defined]
        yield client


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="small", messages=HELLO, logprobs=True) as stream:  # type: ignore[arg-type]
        events = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert "content.delta" in events
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].logprobs is not None
    assert [token.token for token in answer.choices[0].logprobs.content or []] == ["hello", " there"]


def test_hanging_up_on_a_stream_cancels(client: openai.OpenAI, service: Service, house: FakeHouse) -> None:
    stream = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "slow 190"}],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    wait_until(lambda: house.engine.cancellations == 1)
    assert service.status().state == "ready"
    assert house.engine.steps < 190


def test_hanging_up_in_a_prefill_cancels(client: openai.OpenAI, service: Service, house: FakeHouse) -> None:
    client.chat.completions.create(model="small", messages=HELLO)  # type: ignore[arg-type]
    house.engine.prefill_gate.clear()
    stream = client.chat.completions.create(model="small", messages=HELLO, stream=True)  # type: ignore[arg-type]
    assert next(stream).choices[0].delta.role == "assistant"
    stream.close()
    wait_until(lambda: service.status().state == "ready")
    assert house.engine.cancellations == 1


async def test_hanging_up_on_a_whole_answer_cancels(
    serve: Callable[..., object], house: FakeHouse, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:  # type: ignore[attr-defined]
        asking = asyncio.create_task(
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "slow 190"}])
        )
        await asyncio.to_thread(wait_until, lambda: bool(house.engines) and house.engine.steps > 0)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.to_thread(wait_until, lambda: house.engine.cancellations == 1)
    server.close()  # type: ignore[attr-defined]
    assert caplog.text == ""
    assert house.engine.steps < 190


def test_a_server_that_stops_tells_who_is_waiting(serve: Callable[..., object], house: FakeHouse) -> None:
    server = serve()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:  # type: ignore[attr-defined]
        stream = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "slow 190"}], stream=True
        )
        next(stream)
        server.close_soon()  # type: ignore[attr-defined]
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    wait_until(lambda: house.engine.closed)
