"""Python clients with their defaults: `python python_clients.py CLIENT URL` prints, as JSON, what they were answered.

Each imports its client, and yields functions: one says hi, one lets a tool be called, one has a schema filled, and one
stops an answer after its first word.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Asks = Iterator[Callable[[], Any]]
HI, CALL, PET = "say hi", 'call weather {"city": "Rome"}', '{"name": "Rex", "kind": "dog"}'
LONG = "slow 190"
FILL = f"fill {PET}"


class Pet(BaseModel):
    name: str
    kind: Literal["cat", "dog"]


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(title="weather")
    city: str


def weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def with_weather(ask: Callable[..., Any]) -> str:
    """The answer after a call, from a client that leaves the calling to its user."""
    function = {"name": "weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()}
    messages, tools = said(CALL), [{"type": "function", "function": function}]
    message = ask(messages=messages, tools=tools).choices[0].message
    (call,) = message.tool_calls
    result = weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return ask(messages=messages, tools=tools).choices[0].message.content


def first_word(chunks: Any) -> str:
    """The first text of a stream of Chat Completions, which is then left."""
    return next(chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content)


def openai_chat(url: str) -> Asks:
    from openai import OpenAI

    chat = OpenAI(base_url=url, api_key="secret").chat.completions
    yield lambda: chat.create(model="small", messages=said(HI)).choices[0].message.content
    yield lambda: with_weather(lambda **asked: chat.create(model="small", **asked))
    yield lambda: chat.parse(model="small", messages=said(FILL), response_format=Pet).choices[0].message.parsed
    yield lambda: first_word(chat.create(model="small", messages=said(LONG), stream=True))


def openai_responses(url: str) -> Asks:
    from openai import OpenAI

    responses = OpenAI(base_url=url, api_key="secret").responses

    def called() -> str:
        tools: list[Any] = [{"type": "function", "name": "weather", "parameters": Weather.model_json_schema()}]
        response = responses.create(model="small", input=CALL, tools=tools)
        (call,) = (item for item in response.output if item.type == "function_call")
        result = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": weather(**json.loads(call.arguments)),
        }
        return responses.create(model="small", input=[*said(CALL), *response.output, result], tools=tools).output_text

    def stopped() -> str:
        with responses.create(model="small", input=LONG, stream=True) as events:
            return next(event.delta for event in events if event.type == "response.output_text.delta")

    yield lambda: responses.create(model="small", input=HI).output_text
    yield called
    yield lambda: responses.parse(model="small", input=FILL, text_format=Pet).output_parsed
    yield stopped


def pydantic_ai(url: str) -> Asks:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("small", provider=OpenAIProvider(base_url=url, api_key="secret"))

    async def stopped() -> str:
        async with Agent(model).run_stream(LONG) as answer:
            async for text in answer.stream_text(debounce_by=None):
                return text
        return ""

    yield lambda: Agent(model).run_sync(HI).output
    yield lambda: Agent(model, tools=[weather]).run_sync(CALL).output
    yield lambda: Agent(model, output_type=Pet).run_sync(f"call final_result {PET}").output
    yield lambda: asyncio.run(stopped())


def langchain(url: str) -> Asks:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="small", base_url=url, api_key="secret")
    yield lambda: model.invoke(HI).text
    yield lambda: create_agent(model, [weather]).invoke({"messages": said(CALL)})["messages"][-1].text
    yield lambda: model.with_structured_output(Pet).invoke(FILL)
    yield lambda: next(part.text for part in model.stream(LONG) if part.text)


def litellm(url: str) -> Asks:
    from functools import partial

    from litellm import completion

    ask = partial(completion, model="openai/small", api_base=url, api_key="secret")
    yield lambda: ask(messages=said(HI)).choices[0].message.content
    yield lambda: with_weather(ask)
    yield lambda: json.loads(ask(messages=said(FILL), response_format=Pet).choices[0].message.content)
    yield lambda: first_word(ask(messages=said(LONG), stream=True))


def instructor(url: str) -> Asks:
    import instructor
    from openai import OpenAI

    ask = instructor.from_openai(OpenAI(base_url=url, api_key="secret")).create
    yield lambda: ask(model="small", messages=said(HI), response_model=None).choices[0].message.content
    yield lambda: weather(ask(model="small", messages=said(CALL), response_model=Weather).city)
    yield lambda: ask(model="small", messages=said(f"call Pet {PET}"), response_model=Pet)
    yield lambda: first_word(ask(model="small", messages=said(LONG), response_model=None, stream=True))


def llm(url: str) -> Asks:
    from llm.default_plugins.openai_models import Chat

    model = Chat("small", api_base=url, supports_tools=True, supports_schema=True)
    yield lambda: model.prompt(HI, key="secret").text()
    yield lambda: model.chain(CALL, key="secret", tools=[weather]).text()
    yield lambda: json.loads(model.prompt(FILL, key="secret", schema=Pet).text())
    yield lambda: next(iter(model.prompt(LONG, key="secret")))


def anthropic(url: str) -> Asks:
    from anthropic import Anthropic

    messages = Anthropic(base_url=url.removesuffix("/v1"), api_key="secret").messages
    usual: Any = {"model": "small", "max_tokens": 1000}

    def hi() -> str:
        with messages.stream(messages=said(HI), **usual) as stream:
            return "".join(stream.text_stream)

    def called() -> str:
        tool = {"name": "weather", "description": Weather.__doc__, "input_schema": Weather.model_json_schema()}
        asked = {**usual, "messages": said(CALL), "tools": [tool]}
        answer = messages.create(**asked)
        (call,) = (block for block in answer.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
        asked["messages"] += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        return messages.create(**asked).content[0].text

    def stopped() -> str:
        with messages.stream(messages=said(LONG), **usual) as stream:
            return next(iter(stream.text_stream))

    yield hi
    yield called
    yield lambda: messages.parse(messages=said(FILL), output_format=Pet, **usual).parsed_output
    yield stopped


def ollama(url: str) -> Asks:
    from ollama import Client

    client = Client(host=url.removesuffix("/v1"), headers={"Authorization": "Bearer secret"})

    def called() -> str:
        messages = said(CALL)
        message = client.chat("small", messages, tools=[weather]).message
        (call,) = message.tool_calls
        result = weather(**call.function.arguments)
        messages += [message, {"role": "tool", "tool_name": call.function.name, "content": result}]
        return client.chat("small", messages, tools=[weather]).message.content

    def filled() -> Pet:
        message = client.chat("small", said(FILL), format=Pet.model_json_schema()).message
        return Pet.model_validate_json(message.content)

    yield lambda: "".join(part.message.content for part in client.chat("small", said(HI), stream=True))
    yield called
    yield filled
    yield lambda: next(client.generate("small", LONG, stream=True)).response


if __name__ == "__main__":
    name, url = sys.argv[1:]
    told = {}
    for what, ask in zip(("hi", "tool", "schema", "stop"), globals()[name](url), strict=False):
        try:
            result = ask()
        except Exception as error:  # noqa: BLE001 -- the others are still worth trying
            result = f"{type(error).__name__}: {error}"
        told[what] = result.model_dump() if isinstance(result, BaseModel) else result
    sys.stdout.write(json.dumps(told))
