"""The template process: renders chat templates in a child process with limits on time and memory.

A template is a program that need not terminate. jinja's sandbox protects files and Python's internals, but does not
prevent endless loops or memory exhaustion, and no check in the same process could interrupt a single operation in C
(`'a' * 10**10`, a comparison of nested lists). The child is started once, and answers in 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from runtime.errors import RequestError
from runtime.system.child_process import LimitedProcess

SECONDS = 5.0
"""Time limit in seconds: a hundred times what the longest chat needs."""


class TemplateProcess(LimitedProcess):
    """A child process that renders chat templates; started when first needed, and restarted after it was killed.

    Args:
        seconds: Time limit of a request.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__("runtime.text.chat_template", seconds)

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

    def _ask(self, request: Mapping[str, Any]) -> Any:
        try:
            answer = self.ask(request)
        except RecursionError as error:
            raise RequestError(
                "the model's chat template does not accept these messages: they are nested too deeply"
            ) from error
        except OSError as error:
            raise RequestError(
                f"no process could be started to apply the model's chat template ({error.strerror})"
            ) from error
        if answer is None:
            raise RequestError(
                f"the model's chat template was stopped: it took more than {self.seconds:g} s, or crashed. "
                "Choose another model, or another version of this one"
            )
        if "error" in answer:
            raise RequestError(f"the model's chat template does not accept these messages: {answer['error']}")
        return answer["said"]


@lru_cache(maxsize=1)
def template_process() -> TemplateProcess:
    """The process shared by this program."""
    return TemplateProcess()
