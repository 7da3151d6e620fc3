"""The program with an engine that counts until it is stopped. Run by test_cli_process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from app.cli.main import app
from app.cli.services import Services
from models.progress import Progress
from runtime.engine.generation import Piece
from runtime.load.loading import LoadedModel


class CountingEngine:
    name = "counting"
    reason = "a test"
    context = 10**9
    tokenizer = SimpleNamespace(has_chat_template=True)

    def __init__(self, options: Any) -> None:
        self._count = 0
        self.decoder = SimpleNamespace(backend="cpu", options=options, kv_bytes=0)

    def chat_prompt(self, _messages: Sequence[Any], **_options: Any) -> list[int]:
        return [1]

    def reasoning_opened(self, _prompt: list[int]) -> str:
        return ""

    def text_prompt(self, _text: str) -> list[int]:
        return [1]

    def submit(
        self,
        _prompt: list[int],
        _options: Any,
        write: Callable[[Piece], object],
        cancelled: Callable[[], bool],
        **_: Any,
    ) -> None:
        self._request, self._count = (write, cancelled), 0

    def step(self) -> None:
        write, cancelled = self._request
        if not cancelled():
            write(Piece(text=f"{self._count} ", token=1))
            self._count += 1
            time.sleep(0.01)

    def borrow(self, _tokens: int = 0) -> AbstractContextManager[Any]:
        return nullcontext(self.decoder)

    def speculate(self, gamma: Any, *, copied: bool) -> None:
        assert gamma is None

    def close(self) -> None:
        sys.stderr.write("engine closed\n")


class ScriptedServices(Services):
    def load(self, plan: Any, **_how: Any) -> LoadedModel:
        engine: Any = CountingEngine(plan.options)
        return LoadedModel(
            name="small",
            engine=engine,
            backend="cpu",
            reason="a test",
            bits=4,
            kv="fp16",
            k_chunk={},
            context=engine.context,
            weight_bytes=1,
            kv_bytes=0,
        )

    def cached(self, _name: str) -> None:
        return None

    def pull(self, _name: str, _revision: Any, progress: Any, cancelled: Callable[[], bool]) -> Path:
        from models.errors import CancelledError

        for count in range(10**9):
            progress(Progress(phase="download", done=count, total=10**9, unit="bytes", message="downloading"))
            if cancelled():
                raise CancelledError("the download was stopped")
            time.sleep(0.01)
        raise AssertionError


app(obj=ScriptedServices(), prog_name="lowbit-chat")
