"""A fake model without weights: it says what its prompt requests. Words of the prompt are its tokens."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from models.errors import StoreError
from models.progress import Progress
from runtime.engine.generation import Piece, StopMatcher, Usage
from runtime.errors import (
    BackendError,
    Cancelled,
    ContextOverflowError,
    InvalidActivationError,
    OutOfMemoryError,
    Problem,
    RequestError,
    SavedCacheError,
)
from runtime.load.loading import LoadedModel
from runtime.server.service import Service
from runtime.text.sampling import Alternative, SamplingOptions, TokenLogprob
from runtime.text.tool_calls import Tool
from runtime.wire.answers import CacheFacts, Holding, ModelEntry
from runtime.wire.device import DeviceReport, Tuning
from runtime.wire.requests import Candidate, InspectedToken, Inspection, LoadRequest, QuantizeRequest, TuneRequest
from tuner.curve import Curve

CONTEXT = 200
SLOW_BUDGET = 77.0
"""A budget whose tuning waits for the gate."""
ASKED: dict[str, Callable[[list[str]], list[str]]] = {
    "echo": lambda words: words,
    "hold": lambda words: words,
    "count": lambda words: [str(i) for i in range(int(words[0]))],
    "umlauts": lambda _: ["äöü", "\u2028", "😀", "\x85", "\n"],
    "spaces": lambda _: [" ", " ", "x"],
}


class FakeEngine:
    """Does what the last message (or the prompt) says: `echo WORDS`, `count N`, `slow N`, `break`, `die`.

    `hold WORDS` waits for `held` between steps, as an answer that takes very long.
    """

    reasons = False
    """Whether its template begins the reasoning unless a request says otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context = CONTEXT
        self.closed = False
        self.steps = 0
        self.cancellations = 0
        self.threads: set[int] = set()
        self.options: list[SamplingOptions] = []
        self.tools: list[Tool] = []
        self.messages: list[Mapping[str, Any]] = []
        self.messages: list[Mapping[str, Any]] = []
        self.variables: Mapping[str, Any] | None = None
        self.trims: list[bool] = []
        self.chats: list[str | None] = []
        self.forgotten: list[str | None] = []
        self.prefill_gate = threading.Event()
        self.prefill_gate.set()
        self.waiting = 0
        self.held = threading.Event()
        self._texts: dict[int, str] = {}
        self._running: list[tuple[Iterator[Piece | None], Callable[[Piece | Exception], None]]] = []

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final: bool = False,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.messages, self.tools, self.variables = list(messages), list(tools), variables
        if continue_final and messages[-1]["role"] != "assistant":
            raise RequestError("only an assistant's message can be continued")
        return self.text_prompt(messages[-1]["content"], sum(len(m["content"].split()) for m in messages[:-1]))

    def reasoning_opened(self, prompt: Sequence[int]) -> str:
        return "<think>\n" if (self.variables or {}).get("enable_thinking", self.reasons) else ""

    def text_prompt(self, text: str, before: int = 0) -> list[int]:
        tokens = [*range(1, before + len(text.split()) + 1)] or [1]
        self._texts[len(tokens)] = text
        return tokens

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        receive: Callable[[Piece | Exception], None],
        cancelled: Callable[[], bool] = lambda: False,
        *,
        trim: bool = False,
        chat: str | None = None,
    ) -> None:
        if self.closed:
            raise BackendError("the model has been unloaded")
        if len(prompt) + 1 > self.context:
            raise ContextOverflowError(f"the prompt has {len(prompt)} tokens and the context holds {self.context}")
        self.threads.add(threading.get_ident())
        self.options.append(options)
        self.trims.append(trim)
        self.chats.append(chat)
        self._running.append((self._generate(list(prompt), options, cancelled), receive))

    def step(self, *, beside: bool = False) -> bool:
        """A piece of each answer."""
        for both in list(self._running):
            pieces, receive = both
            try:
                item: Piece | Exception | None = next(pieces)
            except InvalidActivationError as error:
                item = error
            if item is None:
                continue
            if isinstance(item, Exception) or item.finish_reason is not None:
                self._running.remove(both)
            receive(item)
        return bool(self._running)

    def fail_all(self, error: Exception) -> None:
        while self._running:
            self._running.pop()[1](error)

    def _generate(
        self, prompt: list[int], options: SamplingOptions, cancelled: Callable[[], bool]
    ) -> Iterator[Piece | None]:
        began = time.perf_counter()
        while not self.prefill_gate.wait(0.005):
            if cancelled():
                break
        verb, *words = self._texts.get(len(prompt), "echo tokens").split() or ["echo"]
        while verb == "hold" and not (self.held.wait(0.001) or cancelled()):
            yield None
        delay = 0.005 if verb == "slow" else 0.0
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        texts = ASKED.get("count" if verb == "slow" else verb, lambda _: ["I", "do", "not", "know"])(words)
        limit = min(options.max_tokens or self.context, self.context - len(prompt))
        stops, finish, done = StopMatcher(options.stop), "stop", 0
        for index, text in enumerate(texts):
            if cancelled():
                self.cancellations += 1
                finish = "cancelled"
                break
            if verb == "break" or text == "BREAK":
                raise InvalidActivationError("NaN met in layer 3")
            self.steps += 1
            done += 1
            piece = text if index == 0 else f" {text}"
            yield Piece(text=stops.add(piece), token=index, logprob=_logprob(index, piece, options.logprobs))
            if stops.stopped:
                break
            if done == limit:
                finish = "length"
                break
            time.sleep(delay)
        usage = Usage(
            prompt_tokens=len(prompt),
            cached_tokens=min(2, len(prompt) - 1),
            completion_tokens=done,
            ttft_s=0.25,
            prefill_s=0.125,
            decode_tokens_per_s=40.0 + 0 * began,
        )
        yield Piece(text=stops.flush(), finish_reason=finish, usage=usage, stop=stops.found)  # type: ignore[arg-type]

    def embed(self, tokens: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> np.ndarray:
        if max(tokens) > 10_000:
            raise RequestError("the prompt contains a token outside the model's vocabulary of 10000")
        if len(tokens) + 1 > self.context:
            raise ContextOverflowError(f"the prompt has {len(tokens)} tokens and the context holds {self.context}")
        vector = np.array([len(tokens), 1, 0, 0], np.float32)
        return vector / np.linalg.norm(vector)

    def score(
        self, prompt: Sequence[int], options: SamplingOptions, *, more: bool, cancelled: Callable[[], bool]
    ) -> list[TokenLogprob]:
        self.embed(prompt, cancelled)
        found = [_logprob(token, f"t{token}", options.logprobs or 0) for token in [*prompt, *([7] if more else [])]]
        return [replace(one, logprob=math.nan) if at == 0 else one for at, one in enumerate(found) if one is not None]

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(has_chat_template=True, decode=lambda tokens: " ".join(map(str, tokens)))

    def inspect(
        self,
        prompt: Sequence[int],
        answer: str,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Inspection:
        if len(prompt) + len(answer.split()) > self.context:
            raise ContextOverflowError("prompt and answer have too many tokens")
        progress(Progress(phase="inspect", done=1, total=1, unit="tokens", message="reading the answer"))
        told = [
            InspectedToken(text=word, candidates=[Candidate(text=word, logit=1.5, probability=0.5)], chosen=0)
            for word in answer.split()
        ]
        return Inspection(tokens=told, model=self.name, compensated=False)

    def forget(self, chat: str | None = None) -> None:
        self.forgotten.append(chat)

    def close(self) -> None:
        self.closed = True


def _logprob(index: int, text: str, count: int | None) -> TokenLogprob | None:
    if count is None:
        return None
    top = tuple(Alternative(token=i, text=f"t{i}", logprob=-1.0 - i) for i in range(count))
    return TokenLogprob(token=index, text=text, logprob=-0.5, top=top)


def entry(name: str, **changes: Any) -> ModelEntry:
    values: dict[str, Any] = {
        "name": name,
        "bits": 3,
        "bits_per_weight": 3.4,
        "disk_bytes": 1000,
        "gpu_bytes": 600,
        "residual_bytes": 300,
        "parameters": 2000,
        "family": "llama",
        "context": CONTEXT,
        "created": 1700000000,
        "certificate": "k_chunk 16: KL 0.151 nats a token",
    }
    return ModelEntry(**values | changes)


def tuning(budget: float) -> Tuning:
    return Tuning(
        device="Some Processor",
        budget_percent=budget,
        n_tb_max=None,
        n_tb={},
        k_chunk={"qkv": round(budget)},
        predicted_slowdown_percent=budget - 0.5,
        measured_slowdown_percent=budget - 1,
        seconds=1.5,
        date="2026-11-21T16:40:00+00:00",
        cached=False,
        curve=(Curve(kind="qkv", n_tb=0, points=((0, 1.0), (8, 1.25))),),
    )


@dataclass
class FakeHouse:
    """Loader, catalogue and builder of a service, and what they were asked for."""

    names: list[str] = field(default_factory=lambda: ["small", "org/other", "broken", "slow-to-load", "demo"])
    loads: list[LoadRequest] = field(default_factory=list)
    tunes: list[TuneRequest] = field(default_factory=list)
    engines: list[FakeEngine] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    forgotten: list[str | None] = field(default_factory=list)
    quantized: list[QuantizeRequest] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    refined: list[str] = field(default_factory=list)
    refined_gate: threading.Event = field(default_factory=threading.Event)
    room: int = 10
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def load(
        self,
        request: LoadRequest,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
        *,
        beside: bool = False,
    ) -> LoadedModel:
        if beside and sum(not engine.closed for engine in self.engines) >= self.room:
            raise OutOfMemoryError("another model takes the memory")
        self.loads.append(request)
        if request.model == "broken":
            raise StoreError("broken is damaged: block-00000.safetensors is cut; quantize the model again")
        for step in range(3):
            progress(Progress(phase="load", done=step, total=3, unit="blocks", message=f"block {step}"))
            while request.model == "slow-to-load" and not self.gate.wait(0.005):
                if cancelled():
                    self.stopped.append("load")
                    raise Cancelled("the load was stopped")
        engine = FakeEngine(request.model)
        self.engines.append(engine)
        return LoadedModel(
            name=request.model,
            engine=engine,
            backend="reference",
            reason="a test asked for it",
            bits=3,
            kv=request.kv or "int4",
            k_chunk={"qkv": request.k_chunk} if isinstance(request.k_chunk, int) else request.k_chunk or {},
            context=request.context or CONTEXT,
            weight_bytes=600,
            kv_bytes=50,
            held_bytes=650,
            card_bytes=400,
            caches={"int4": CacheFacts(bytes_per_token=12.5, context=77)},
            sampling=self.sampling,
        )

    def tune(
        self,
        loaded: LoadedModel,
        request: TuneRequest,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        self.tunes.append(request)
        if request.k_chunk is not None:
            chosen = {"qkv": request.k_chunk} if isinstance(request.k_chunk, int) else request.k_chunk
            return replace(loaded, k_chunk=chosen, tuning=None)
        for step in range(3):
            progress(Progress(phase="tune", done=step, total=3, unit="layers", message=f"layer {step}"))
            while request.budget == SLOW_BUDGET and not self.gate.wait(0.005):
                if cancelled():
                    self.stopped.append("tune")
                    raise Cancelled("tuning was stopped")
        budget = 5.0 if request.budget is None else request.budget
        return replace(loaded, k_chunk={"qkv": round(budget)}, tuning=tuning(budget), problems=())

    def refine(self, loaded: LoadedModel, cancelled: Callable[[], bool]) -> LoadedModel:
        self.refined.append(loaded.name)
        while not self.refined_gate.wait(0.005):
            if cancelled():
                return loaded
        if loaded.name == "broken-by-refining":
            raise ValueError("a bug")
        if loaded.tuning is None or loaded.tuning.refined:
            return loaded
        return replace(loaded, tuning=replace(loaded.tuning, refined=True))

    def forget(self, chat: str | None) -> Holding:
        if chat == "stuck":
            raise SavedCacheError("cannot delete the saved cache x.kv: Read-only file system")
        self.forgotten.append(chat)
        return Holding(files=2, bytes=2000)

    def held(self) -> Holding:
        return Holding(files=3, bytes=3000)

    def inspect(self, idle: bool) -> DeviceReport:
        machine = {"cpu": {"name": "Some Processor"}, "memory": {}, "gpu": None, "pcie": None}
        problem = Problem(what="it is hot", fix="open a window")
        return DeviceReport(machine=machine, bandwidth_gb_s=10.0 if idle else None, problems=(problem,))

    def entries(self) -> list[ModelEntry]:
        return [entry(name, bundled=name == "demo") for name in self.names]

    def find(self, name: str) -> ModelEntry | None:
        return next((found for found in self.entries() if found.name == name), None)

    def info(self, name: str) -> Any:
        return None if self.find(name) is None else SimpleNamespace(name=name, summary=SimpleNamespace(context=CONTEXT))

    def chat_template(self, name: str) -> str:
        return "{% if enable_thinking %}" if name == "small" else ""

    def remove(self, name: str) -> None:
        if name == "demo":
            raise RequestError("the bundled model cannot be removed")
        if name not in self.names:
            raise StoreError(f"there is no stored model {name!r}")
        self.names.remove(name)
        self.removed.append(name)

    def quantize(
        self, request: QuantizeRequest, progress: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> ModelEntry:
        self.quantized.append(request)
        self._work("quantize", request.source, progress, cancelled)
        self.names.append(request.name or "made")
        return entry(
            request.name or "made",
            bits=request.bits,
            perplexity_before=9.0,
            perplexity_after=9.5,
            warning=f"a warning about {request.method}",
        )

    def pull(
        self, name: str, revision: str | None, progress: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> str:
        self._work("download", name, progress, cancelled)
        return f"/cache/{name}/{revision}"

    def _work(
        self, phase: str, source: str, progress: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> None:
        for step in range(3):
            progress(Progress(phase=phase, done=step, total=3, unit="blocks", message=f"{phase} {step}"))
            while source == "slow" and not self.gate.wait(0.005):
                if cancelled():
                    self.stopped.append(phase)
                    raise Cancelled(f"the {phase} was stopped")


def make_service(house: FakeHouse | None = None, **options: Any) -> tuple[Service, FakeHouse]:
    house = house or FakeHouse()
    return Service(house, house, house, inspector=house.inspect, **options), house
