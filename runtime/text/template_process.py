"""The template process: renders chat templates in a child process with limits on time and memory.

A template is a program that need not terminate. jinja's sandbox protects files and Python's internals, but does not
prevent endless loops or memory exhaustion, and no check in the same process could interrupt a single operation in C
(`'a' * 10**10`, a comparison of nested lists). The child is started once, and answers in 0.2 ms.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from runtime.errors import RequestError
from runtime.system.child_process import ChildProcess

SECONDS = 5.0
"""Time limit in seconds: a hundred times what the longest chat needs."""


class TemplateProcess:
    """A child process that renders chat templates; started when first needed, and restarted after it was killed.

    Args:
        seconds: Time limit of a request.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child = ChildProcess("runtime.text.chat_template", str(seconds))

    def start(self) -> None:
        """Start the process unless it is running; it gets ready in the background."""
        with self._lock, contextlib.suppress(OSError):
            self._child.start()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokens: Mapping[str, str],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation; see `runtime.text.chat_template.render`.

        Raises:
            RequestError: the template is broken, refuses these messages, or takes too much time or memory.
        """
        request = {"messages": list(messages), "tokens": dict(tokens), "tools": list(tools)}
        more = {"continue_final": continue_final, "variables": dict(variables or {})}
        return str(self._ask({"template": template, **request, **more}))

    def knows_tools(self, template: str) -> bool:
        """Whether a template renders the tools it is given.

        Raises:
            RequestError: the template is broken, or takes too much time or memory.
        """
        return bool(self._ask({"template": template}))

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with self._lock:
            self._child.close()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        try:
            line = json.dumps(request).encode()
        except RecursionError as error:
            raise RequestError(
                "the model's chat template does not accept these messages: they are nested too deeply"
            ) from error
        with self._lock:
            try:
                answer = next(self._child.lines(line), None)
            except OSError as error:
                raise RequestError(
                    f"no process could be started to apply the model's chat template ({error.strerror})"
                ) from error
            if answer is None:
                self._child.close()
                raise RequestError(
                    f"the model's chat template was stopped: it took more than {self._seconds:g} s, or crashed. "
                    "Choose another model, or another version of this one"
                )
        found = json.loads(answer)
        if "error" in found:
            raise RequestError(f"the model's chat template does not accept these messages: {found['error']}")
        return found["said"]


@lru_cache(maxsize=1)
def template_process() -> TemplateProcess:
    """The process shared by this program."""
    return TemplateProcess()
