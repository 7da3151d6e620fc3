"""The process that applies chat templates, and may be killed: a template is a program that need not end.

jinja's sandbox keeps a template from files and from Python's insides, but not from looping or from filling memory. No
check in this process could stop an operation of C (`'a' * 10**10`, a comparison of nested lists). So templates run in a
child with a limit on time and memory. It is started once, and answers in 0.2 ms.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from runtime.errors import RequestError
from runtime.system.child import child_command

SECONDS = 5.0
"""The longest that applying a template may take: a hundred times what the longest chat needs."""
_END_S = 1.0


class TemplateProcess:
    """A child process that applies chat templates; started when it is first needed, and again where it was killed.

    Args:
        seconds: The longest that a request may take.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs; it gets ready while the caller goes on."""
        with self._lock, contextlib.suppress(RequestError):
            self._running()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokens: Mapping[str, str],
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as text; see `runtime.text.chat_template.render`.

        Raises:
            RequestError: the template is broken, refuses these messages, or takes too much time or memory.
        """
        request = {"messages": list(messages), "tokens": dict(tokens), "tools": list(tools)}
        return str(self._ask({"template": template, "continue_final": continue_final, **request}))

    def knows_tools(self, template: str) -> bool:
        """Whether a template writes down the tools that it is given.

        Raises:
            RequestError: the template is broken, or takes too much time or memory.
        """
        return bool(self._ask({"template": template}))

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        try:
            line = json.dumps(request).encode() + b"\n"
        except RecursionError as error:
            raise RequestError(
                "the model's chat template does not accept these messages: they are nested too deeply"
            ) from error
        with self._lock:
            child = self._running()
            assert child.stdin is not None, "it was started with a pipe"
            assert child.stdout is not None, "it was started with a pipe"
            try:
                child.stdin.write(line)
                child.stdin.flush()
                answer = child.stdout.readline()
            except OSError:
                answer = b""
            if not answer.endswith(b"\n"):
                self._end()
                raise RequestError(
                    f"the model's chat template was stopped: it took more than {self._seconds:g} s, or crashed. "
                    "Choose another model, or another version of this one"
                )
        found = json.loads(answer)
        if "error" in found:
            raise RequestError(f"the model's chat template does not accept these messages: {found['error']}")
        return found["said"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            command = child_command("runtime.text.chat_template", str(self._seconds))
            try:
                self._child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise RequestError(
                    f"no process could be started to apply the model's chat template ({error.strerror})"
                ) from error
            atexit.register(self.close)
        return self._child

    def _end(self) -> None:
        """Close the pipes, upon which the process ends, or is killed."""
        child, self._child = self._child, None
        if child is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError), child:  # what is not written yet finds no reader
            assert child.stdin is not None, "it was started with a pipe"
            try:
                child.stdin.close()
                child.wait(_END_S)
            except (OSError, subprocess.TimeoutExpired):
                child.kill()


@lru_cache(maxsize=1)
def template_process() -> TemplateProcess:
    """The one of this program."""
    return TemplateProcess()
