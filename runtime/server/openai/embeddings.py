"""Validation of requests for embeddings, and their responses."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.server.bodies import Items, Tokens, refused
from runtime.server.openai.forms import Part
from runtime.server.records import Embedded
from runtime.text.sampling import Float32Array

MAX_INPUTS = 2048
"""Most texts per request, as in OpenAI's interface."""


class EmbeddingsRequest(Part):
    """Body of POST /v1/embeddings."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    input: str | Tokens | Annotated[Items[str | Tokens], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    def check(self) -> None:
        """Reject unsupported requests.

        Raises:
            ApiError: names the field.
        """
        if self.dimensions is not None:
            raise refused("dimensions", "dimensions is not supported: a vector has the model's own width")
        if any(not text for text in self.texts):
            raise refused("input", "input holds an empty text: give each at least one letter")

    @property
    def texts(self) -> list[str | list[int]]:
        """The texts, or their tokens."""
        given: Any = self.input  # its first member shows which type it has
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)


def embeddings_body(asked: EmbeddingsRequest, vectors: Sequence[Embedded]) -> dict[str, Any]:
    """The response in OpenAI's format."""
    tokens = sum(one.tokens for one in vectors)
    return {
        "object": "list",
        "model": vectors[0].model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(one.vector, asked.encoding_format)}
            for index, one in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _written(vector: Float32Array, form: str | None) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else list(map(float, vector))
