"""Tools and forms of answers: through the official client and its helpers, on a scripted model and the bundled one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from fake_engine import FakeHouse
from pydantic import BaseModel, Field

from assets import demo_path
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.load.plan import open_engine
from runtime.text.constraint import Grammar
from tests.runtime.server.conftest import Standing, standing


class Weather(BaseModel):
    """Says what the weather is like."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


class Pet(BaseModel):
    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


TOOLS: Any = [openai.pydantic_function_tool(Weather, name="weather")]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
ASK: Any = [{"role": "user", "content": f"echo {CALL}"}]


@pytest.fixture
def client(shared: Standing) -> openai.OpenAI:
    return shared.client


@pytest.fixture
def house(shared: Standing) -> FakeHouse:
    for engine in shared.house.engines:
        engine.options.clear()
    return shared.house


@pytest.fixture(scope="module")
def real() -> Iterator[openai.OpenAI]:
    """The client of a server with the bundled model in it."""
    engine = open_engine(StoredModel.open_folder(demo_path(), "demo"), DecoderOptions(context=512), "cpu")
    with standing() as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fake_engine.FakeEngine", lambda _name: engine)
            found.client.completions.create(model="small", prompt="x", max_tokens=1)
        yield found.client


def test_a_call_is_told_from_text(client: openai.OpenAI, house: FakeHouse) -> None:
    answer = client.chat.completions.create(model="small", messages=ASK, tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome", "days": 2})
    assert [tool.name for tool in house.engine.tools] == ["weather"]
    told = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    told.append({"role": "user", "content": "echo thanks"})
    assert client.chat.completions.create(model="small", messages=told).choices[0].message.content == "thanks"


def test_text_stays_text(client: openai.OpenAI, house: FakeHouse) -> None:
    plain: Any = [{"role": "user", "content": "echo <b> and [1, 2]"}]
    choice = client.chat.completions.create(model="small", messages=plain, tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "<b> and [1, 2]")
    assert choice.message.tool_calls is None
    choice = client.chat.completions.create(model="small", messages=ASK, tools=TOOLS, tool_choice="none").choices[0]
    assert choice.message.content == CALL
    assert house.engine.tools == []


@pytest.mark.parametrize("before", ["", "I look. "])
def test_the_streaming_helper_gathers_calls(client: openai.OpenAI, before: str) -> None:
    ask: Any = [{"role": "user", "content": f"echo {before}{CALL} {CALL}"}]
    with client.chat.completions.stream(model="small", messages=ask, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    message = answer.choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert (message.content or "").strip() == before.strip()
    assert message.tool_calls is not None
    assert [call.function.parsed_arguments for call in message.tool_calls] == [Weather(city="Rome", days=2)] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.choices[0].finish_reason == "tool_calls"


def test_one_call_where_several_are_not_wanted(client: openai.OpenAI) -> None:
    ask: Any = [{"role": "user", "content": f"echo {CALL} {CALL}"}]
    answer = client.chat.completions.create(model="small", messages=ask, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or ()) == 1


def test_wishes_reach_the_engine(client: openai.OpenAI, house: FakeHouse) -> None:
    ask: Any = [{"role": "user", "content": "echo x"}]
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"choice": ['say "a"', "b"]}}},
        {"extra_body": {"structured_outputs": {"json": {"type": "integer"}}}},
        {"extra_body": {"structured_outputs": {"grammar": 'start: "x"'}}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
    ]
    for form in forms:
        client.chat.completions.create(model="small", messages=ask, **form)
    client.completions.create(model="small", prompt="echo x", extra_body={"structured_outputs": {"regex": "[0-9]"}})
    given = [options.grammar for options in house.engine.options]
    assert given[0] is None
    assert given[1] == Grammar.of_schema({"type": "object"})
    assert None not in given[1:5]
    assert given[7] == given[1]
    assert given[8] == Grammar.of_regex("[0-9]")
    calls = [options.calls for options in house.engine.options]
    assert calls[5] == calls[6]
    assert calls[5].required
    assert calls[7] is not None
    assert not calls[7].required
    assert calls[:5] == [None] * 5


CHECKED: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "pattern": "^(?!Rome)"}}},
        },
    }
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("city", "times"), [("Paris", 1), ("Rome", 2)])
def test_a_call_that_does_not_fit_is_asked_for_once_more(
    client: openai.OpenAI, house: FakeHouse, city: str, times: int, stream: bool
) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
    ask: Any = [{"role": "user", "content": f"echo {call}"}]
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    more: Any = {"tools": CHECKED, "response_format": {"type": "json_object"}, "extra_body": variables}
    if stream:
        with client.chat.completions.stream(model="small", messages=ask, **more) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(model="small", messages=ask, **more)
    assert house.engine.variables == {"enable_thinking": False}
    given = [options.calls for options in house.engine.options]
    assert [rules.required for rules in given] == [False, True][:times]
    assert [options.grammar is None for options in house.engine.options] == [False, True][:times]
    message = answer.choices[0].message
    if times == 1:
        (found,) = message.tool_calls or ()
        assert found.function.arguments == '{"city": "Paris"}'
    else:
        assert message.content == "I do not know"  # the scripted model has nothing else to say to its error


def test_text_before_a_call_that_is_checked_comes_at_once(client: openai.OpenAI, house: FakeHouse) -> None:
    ask: Any = [{"role": "user", "content": f"echo Well then. {CALL.replace('Rome', 'Paris')}"}]
    chunks = client.chat.completions.create(model="small", messages=ask, tools=CHECKED, stream=True)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(texts) > 1
    assert "".join(texts).strip() == "Well then."


def test_arguments_are_streamed(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model="small", messages=ASK, tools=TOOLS, stream=True)
    parts = [
        call.function.arguments
        for chunk in chunks
        for call in (chunk.choices[0].delta.tool_calls or () if chunk.choices else ())
    ]
    assert len(parts) > 2
    assert json.loads("".join(filter(None, parts))) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_the_bundled_model_fits_a_pydantic_class(real: openai.OpenAI, temperature: float) -> None:
    ask: Any = [{"role": "user", "content": "Invent a pet."}]
    answer = real.chat.completions.parse(
        model="small", messages=ask, response_format=Pet, temperature=temperature, seed=5, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)
    with real.chat.completions.stream(
        model="small", messages=ask, response_format=Pet, temperature=temperature, seed=5, max_tokens=300
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_the_bundled_model_calls_what_it_must(real: openai.OpenAI) -> None:
    ask: Any = [{"role": "user", "content": "What is the weather like in Rome?"}]
    for seed in range(3):
        answer = real.chat.completions.parse(
            model="small", messages=ask, tools=TOOLS, tool_choice="required", temperature=1, seed=seed, max_tokens=300
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Weather)
        assert answer.choices[0].finish_reason == "tool_calls"
