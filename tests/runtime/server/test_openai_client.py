"""The official client, unchanged, against a real server on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import openai
import pytest
from fake_engine import CONTEXT, FakeHouse

from runtime.server.service.service import Service

HELLO = [{"role": "user", "content": "echo hello there"}]


@pytest.fixture
def client(serve: Callable[..., object]) -> Iterator[openai.OpenAI]:
    server = serve(token="secret")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:  # type: ignore[attr-defined]
        yield client


def wait_until(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "org/other", "broken", "slow-to-load", "demo"]
    assert client.models.retrieve("org/other").owned_by == "lowbit-chat"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, temperature=0, seed=1)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["ttft_s"] == 0.25


def test_chat_as_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="small",
        messages=HELLO,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello there"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="small", messages=HELLO, logprobs=True) as stream:  # type: ignore[arg-type]
        events = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert "content.delta" in events
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].logprobs is not None
    assert [token.token for token in answer.choices[0].logprobs.content or []] == ["hello", " there"]


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, logprobs=True, top_logprobs=3)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert [(token.token, token.logprob, len(token.top_logprobs)) for token in tokens] == [
        ("hello", -0.5, 3),
        (" there", -0.5, 3),
    ]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="small", prompt="echo one two", logprobs=2, stop=["two"])
    assert answer.choices[0].text.strip() == "one"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 3]
    stream = client.completions.create(model="small", prompt="echo one two", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one two"


def test_unknown_fields_are_tolerated(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small",
        messages=HELLO,  # type: ignore[arg-type]
        user="me",
        metadata={"a": "b"},
        store=False,
        extra_body={"top_k": 3, "something_new": [1]},
    )
    assert answer.choices[0].message.content == "hello there"


@pytest.mark.parametrize(
    ("change", "kind", "code", "param"),
    [
        ({"model": "nowhere"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "echo " + "x " * CONTEXT}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"n": 2}, openai.BadRequestError, None, "n"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            openai.BadRequestError,
            "invalid_value",
            "messages[0].content",
        ),
        ({"model": "broken"}, openai.InternalServerError, "model_unavailable", None),
    ],
)
def test_errors_become_the_clients_own(
    client: openai.OpenAI, change: dict[str, object], kind: type[openai.APIStatusError], code: str | None, param: str
) -> None:
    asked: dict[str, object] = {"model": "small", "messages": HELLO, **change}
    with pytest.raises(kind) as failure:
        client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert (failure.value.code, failure.value.param) == (code, param)


def test_a_wrong_key(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_body_that_is_too_large(serve: Callable[..., object]) -> None:
    server = serve(max_body_bytes=1000)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)  # type: ignore[attr-defined]
    with client, pytest.raises(openai.APIStatusError) as failure:
        client.completions.create(model="small", prompt="x" * 2000)
    assert failure.value.status_code == 413


def test_a_failure_in_the_middle(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "echo a BREAK"}],
        stream=True,
    )
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == "a"
    with pytest.raises(openai.APIError, match="NaN"):
        next(stream)


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


async def test_many_at_once(serve: Callable[..., object]) -> None:
    server = serve()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:  # type: ignore[attr-defined]
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model="small", messages=[{"role": "user", "content": f"echo {i}"}])
                for i in range(16)
            )
        )
    assert [answer.choices[0].message.content for answer in answers] == [str(i) for i in range(16)]


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
