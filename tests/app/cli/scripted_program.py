"""The program with an engine that counts until it is stopped. Run by test_cli_process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from app.cli.main import app
from app.cli.services import Services
from models.progress import Progress
from runtime.engine.generation import Piece, Usage


class CountingEngine:
    name = "counting"
    reason = "a test"
    context = 10**9
    chat_stops = ()
    tokenizer = SimpleNamespace(note=None)

    def __init__(self, options: Any) -> None:
        self.decoder = SimpleNamespace(backend="cpu", options=options, kv_bytes=0)

    def chat_prompt(self, _messages: Sequence[Any], **_options: Any) -> list[int]:
        return [1]

    def reasoning_opened(self, _prompt: list[int]) -> str:
        return ""

    def text_prompt(self, _text: str) -> list[int]:
        return [1]

    def generate(self, _prompt: list[int], _options: Any, cancelled: Callable[[], bool]) -> Iterator[Piece]:
        count = 0
        while not cancelled():
            yield Piece(text=f"{count} ", token=1)
            count += 1
            time.sleep(0.01)
        usage = Usage(
            prompt_tokens=1, cached_tokens=0, completion_tokens=count, ttft_s=0, prefill_s=0, decode_tokens_per_s=1
        )
        yield Piece(text="", finish_reason="cancelled", usage=usage)

    def borrow(self, _tokens: int = 0) -> AbstractContextManager[Any]:
        return nullcontext(self.decoder)

    def speculate(self, gamma: Any, *, copied: bool) -> None:
        assert gamma is None

    def close(self) -> None:
        sys.stderr.write("engine closed\n")


class ScriptedServices(Services):
    def open_engine(self, plan: Any, progress: Any) -> Any:
        return CountingEngine(plan.options)

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
