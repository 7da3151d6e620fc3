"""`/v1/embeddings` through the official client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from fake_engine import CONTEXT


@pytest.fixture
def client(serve: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serve().url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_texts_and_tokens(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="small", input=["one", "two words"])
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx([0.70710678, 0.70710678, 0, 0])
    assert answer.usage.prompt_tokens == 3
    plain = client.embeddings.create(model="small", input="one", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding)
    assert client.embeddings.create(model="small", input=[1, 2]).usage.prompt_tokens == 2
    assert len(client.embeddings.create(model="small", input=[[1], [2, 3]]).data) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"dimensions": 5}, "dimensions"),
        ({"input": [20_000]}, "input"),
        ({"input": ["a", "x " * CONTEXT]}, "input[1]"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        client.embeddings.create(**{"model": "small", "input": "a", **change})
    assert failure.value.param is not None
    assert failure.value.param.split("[")[0] == param.split("[")[0]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nowhere", input="a")
