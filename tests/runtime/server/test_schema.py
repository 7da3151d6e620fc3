"""The OpenAPI document: requests that fit it and requests that do not never break the server.

`EXAMPLES=100` asks 2,400 times; `make fuzz` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_engine import make_service
from hypothesis import HealthCheck, given, settings
from schemathesis import Case
from schemathesis.generation import GenerationMode

from runtime.server.errors import form_of, ollama_form
from runtime.server.openapi import document
from runtime.server.security import Security
from runtime.server.serve import create_app

EXAMPLES = int(os.environ.get("EXAMPLES", "25"))
"""Requests to each path, fitting and not."""
SIMPLE = frozenset({"model", "stream", "temperature", "top_p", "seed", "stop", "tools", "options"})
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "echo x"}]}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "echo x"},
    "/api/embed": {"input": ["one", "two"]},
    "/api/embeddings": {"input": "one"},
    "/api/show": {},
    "/api/pull": {},
    "/v1/completions": {"prompt": "echo x"},
    "/v1/responses": {"input": "echo x"},
    "/v1/embeddings": {"input": ["one", "two"]},
}
BOTH = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
OPERATIONS = [
    (path, method, mode)
    for path, item in document()["paths"].items()
    for method in item
    for mode in (BOTH if method == "post" or "{" in path else BOTH[:1])  # without parameters nothing can be wrong
]


@pytest.fixture(scope="module")
def interface() -> Iterator[Any]:
    service, _ = make_service()
    app = create_app(service, Security(hosts=frozenset({"testserver"})))
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    assert service.close()


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_nothing_that_is_asked_breaks_it(interface: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = interface[path][method]
    statuses = set()

    @settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["model"] = "small"  # which no random name would be
            if len(case.body) % 2:  # most bodies with everything in them contradict themselves
                case.body = {field: case.body[field] for field in SIMPLE & case.body.keys()} | PLAIN[path]
        response = case.call(headers={"Host": "testserver"})
        statuses.add(response.status_code)
        assert response.status_code < 500 or response.status_code in (503, 529), (case.body, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error if form_of(path) is ollama_form else error["message"]
            assert "Traceback" not in response.text
        assert str(response.status_code) in operation.definition.raw["responses"], (case.body, response.text)

    ask()
    assert statuses if mode is GenerationMode.NEGATIVE or "{" in path else 200 in statuses
