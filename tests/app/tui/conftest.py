"""A scripted runtime for the terminal UI: it streams given text at a given rate, fails, crashes, is slow to load."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from app import paths
from app.errors import ClientError, ContextLengthError
from app.protocol import CallDelta, ChatDelta, ChatOptions
from app.settings import Settings
from app.tui.app import ChatApp
from models.catalogue import CATALOGUE
from models.progress import Progress
from runtime.compensation import EXACT
from runtime.errors import Problem
from runtime.wire.answers import CacheFacts, Caches, Holding, ModelEntry, Status, Timings
from runtime.wire.device import DeviceReport, Offer, Prospect, Tuning
from runtime.wire.requests import (
    Candidate,
    InspectedToken,
    Inspection,
    InspectRequest,
    LoadRequest,
    QuantizeRequest,
    TuneRequest,
)
from tuner.curve import Curve

MEGABYTE = 1_000_000
HOSTILE = Path(__file__).parents[1] / "tools" / "hostile.py"


def entry(name: str, **changes: Any) -> ModelEntry:
    """A stored model of 4 bits and 12 MB."""
    values: dict[str, Any] = {
        "name": name, "bits": 4.0, "bits_per_weight": 4.5, "disk_bytes": 12 * MEGABYTE, "gpu_bytes": 8 * MEGABYTE,
        "residual_bytes": 4 * MEGABYTE, "parameters": 16 * MEGABYTE, "family": "llama", "context": 8192,
    }  # fmt: skip
    return ModelEntry(**values | changes)


DEAD = Status(state="empty", backend="cpu", reason="no GPU was found", kv="int4", memory_bytes=120 * MEGABYTE)
"""What is known of a runtime that has no model."""
TIMINGS = Timings(
    ttft_s=0.21, prefill_tokens_per_s=400.0, decode_tokens_per_s=58.1, prompt_tokens=888, cached_tokens=0,
    completion_tokens=412, k_chunk=None, slowdown_percent=None,
)  # fmt: skip
DONE = Progress(phase="done", done=1, total=1, unit="", message="")
MACHINE: dict[str, Any] = {
    "cpu": {"name": "Example 7840U", "physical_cores": 8, "usable_cores": 8, "kernels": "avx512_vnni"},
    "memory": {"total_bytes": 32_000 * MEGABYTE, "available_bytes": 21_400 * MEGABYTE},
    "gpu": None,
    "pcie": None,
    "backend": "cpu",
    "reason": "no GPU was found",
}
CACHES = {
    kv: CacheFacts(bytes_per_token=size, context=fits)
    for kv, size, fits in (("fp16", 131_072, 40_960), ("int8", 66_560, 81_920), ("int4", 33_792, 131_072))
}
CHUNKS = {"qkv": 48, "o": 41, "gate_up": 44, "down": 48}
"""By layer type, at a budget of 5 %."""


OFFER = Offer(
    words="within 0.3 % of full precision and 11 % slower than low bits (low bits with all residuals; 4 tokens drafted "
    "per round, 83 % accepted)",
    target="residual",
    gamma=4,
)


def won(slowdown: float) -> float:
    """The share of the loss that the scripted tuner says is won back."""
    return round(slowdown / (slowdown + 6), 3)


def tuned(budget: float) -> Tuning:
    """What the scripted tuner finds."""
    chunks = {kind: round(k * budget / 5) for kind, k in CHUNKS.items()}
    knees = tuple(
        Curve(kind=kind, n_tb=0, points=tuple((k, 1 + max(0, k - at) * 0.004) for k in range(0, 129, 8)))
        for kind, at in chunks.items()
        if at
    )
    return Tuning(
        device="Example 7840U", budget_percent=budget, n_tb_max=None, n_tb={}, k_chunk=chunks,
        predicted_slowdown_percent=budget * 0.92, measured_slowdown_percent=budget * 0.84, seconds=42.0,
        date="2026-11-21T16:40:00+00:00", cached=False, curve=knees,
        predicted_loss_won=won(budget * 0.92), loss_without=1.0, offer=OFFER,
        bought=tuple((slowdown, won(slowdown)) for slowdown in (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0)),
    )  # fmt: skip


def inspected(answer: str, *, compensated: bool = True, drafts: bool = True) -> Inspection:
    """What the scripted runtime says of an answer: every third token was changed, every fourth guessed wrong."""
    tokens = []
    for at, word in enumerate(re.findall(r"\s*\S+|\s+$", answer)):
        sure = (0.97, 0.7, 0.3, 0.1, 0.02)[at % 5]
        base = (0.1, 0.6) if at % 3 == 2 else (0.8 * sure, 0.1)
        candidates = [
            Candidate(
                text=text, logit=12.0 - rank, probability=sure / (1 + 3 * rank),
                base_logit=11.5 - rank if compensated else None,
                base_probability=base[rank] if compensated and rank < 2 else None,
            )
            for rank, text in enumerate((word, " other", " third"))
        ]  # fmt: skip
        tokens.append(
            InspectedToken(
                text=word,
                candidates=candidates,
                chosen=0,
                base_best=int(at % 3 == 2) if compensated else None,
                draft=(1 if at % 4 == 3 else 0) if drafts and at else None,
            )
        )
    return Inspection(tokens=tokens, model="demo", compensated=compensated)


class GoneError(ClientError):
    """The connection broke."""


@dataclass
class Runtime:
    """The script, what was asked, and whether the process is alive."""

    answers: list[str] = field(default_factory=lambda: ["Hello from the script."])
    """Taken in turn; the last one again and again."""
    delay_s: float = 0.0
    """Between two pieces of an answer."""
    crash_after: int | None = None
    """Pieces after which the process is gone, once."""
    fail_with: str | None = None
    """The answer fails with this error after `fail_after` pieces, once."""
    fail_after: int = 0
    load_steps: int = 3
    load_delay_s: float = 0.0
    load_error: str | None = None
    load_gate: asyncio.Event | None = None
    """Neither a load nor the making of a model ends before it is set."""
    dies_while_loading: bool = False
    """The process is gone at the next step of a load, once."""
    start_error: str | None = None
    tune_delay_s: float = 0.0
    """Between two reports of tuning."""
    tune_error: str | None = None
    tuning: Tuning | None = None
    untunable: Problem | None = None
    """Why budgets have no effect."""
    inexact: Problem | None = None
    """Why answers can't be exact."""
    problems: list[Problem] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Answers and tunings wait for each other."""
    timings: Timings = TIMINGS
    entries: list[ModelEntry] = field(
        default_factory=lambda: [entry("demo", bundled=True), entry("tiny-3bit", bits=3.0)]
    )
    context: int = 8192
    alive: bool = False
    status: Status = DEAD
    starts: int = 0
    closed: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    hold_after: int | None = None
    """Pieces after which the answer hangs until it is stopped, or `released`, once."""
    saved: Holding = field(default_factory=lambda: Holding(files=2, bytes=34 * MEGABYTE))
    """What is on disk of chats."""
    forget_error: str | None = None
    """Why nothing can be forgotten, once."""
    too_long: int = 0
    """So many prompts are refused as too long."""
    inspection: Inspection | None = None
    """What it says of the tokens of an answer; by default `inspected`."""
    inspect_error: str | None = None
    finish_reason: str = "stop"
    answers_as: str | None = None
    """The model that says it answers, if it is another than was asked."""
    shelf: bool = True
    """Whether models to fetch are known."""
    machine: Mapping[str, Any] = field(default_factory=lambda: MACHINE)
    """What it says was detected."""
    free_bytes: int = MACHINE["memory"]["available_bytes"]
    """Main memory that is free."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets the answer that hangs go on."""

    def named(self, what: str) -> list[Any]:
        """The arguments of all calls of one kind."""
        return [arguments for name, arguments in self.calls if name == what]

    def die(self) -> None:
        """The process is gone."""
        self.alive = False
        self.status = DEAD


class Client:
    """What the UI sees of the script."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def _check(self) -> None:
        if not self.runtime.alive:
            raise GoneError("connection refused")

    async def status(self) -> Status:
        self._check()
        return self.runtime.status

    async def models(self) -> Sequence[ModelEntry]:
        self._check()
        loaded = self.runtime.status.model
        return [replace(entry, loaded=entry.name == loaded) for entry in self.runtime.entries]

    async def load(self, request: LoadRequest) -> AsyncIterator[Progress]:
        self._check()
        runtime = self.runtime
        runtime.calls.append(("load", request))
        try:
            for step in range(runtime.load_steps):
                yield Progress(
                    phase="load",
                    done=step * MEGABYTE,
                    total=runtime.load_steps * MEGABYTE,
                    unit="bytes",
                    message="weights",
                )
                await asyncio.sleep(runtime.load_delay_s)
                if runtime.dies_while_loading:
                    runtime.dies_while_loading = False
                    runtime.die()
                    raise GoneError("the connection was closed")
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("load")
            raise
        if runtime.load_gate is not None:
            await runtime.load_gate.wait()
        if runtime.load_error:
            raise ClientError(runtime.load_error)
        found = next((entry for entry in runtime.entries if entry.name == request.model), None)
        if found is None:
            raise ClientError(f"there is no model {request.model!r}")
        runtime.status = replace(
            DEAD, state="ready", model=found.name, bits=found.bits, base=found.base, kv=request.kv or "int4",
            memory_bytes=812 * MEGABYTE, context=request.context or runtime.context,
        )  # fmt: skip
        self._compensate(request)
        yield DONE

    def _compensate(self, request: LoadRequest | TuneRequest) -> None:
        runtime = self.runtime
        k_chunk = request.k_chunk
        assert not isinstance(k_chunk, Mapping)
        exact = request.budget == EXACT
        if exact and runtime.inexact is not None:
            if isinstance(request, TuneRequest):
                raise ClientError(runtime.inexact.what)
            assert request.or_usual
            runtime.problems, exact = [runtime.inexact], False
        runtime.status = replace(runtime.status, exact=exact)
        if exact:
            runtime.tuning, none = None, dict.fromkeys(CHUNKS, 0)
            runtime.status = replace(runtime.status, k_chunk=none, slowdown_percent=None, budget_percent=None)
            return
        budget = 5.0 if request.budget in (None, EXACT) else request.budget
        assert isinstance(budget, float | int)
        if runtime.untunable is not None and k_chunk is None:
            runtime.problems = [runtime.untunable]
            runtime.status = replace(runtime.status, k_chunk=dict.fromkeys(CHUNKS, 0))
            return
        runtime.tuning = None if k_chunk is not None else tuned(budget)
        if runtime.tuning is not None:
            chunks, slowdown = runtime.tuning.k_chunk, runtime.tuning.measured_slowdown_percent
        else:
            chunks, slowdown = dict.fromkeys(CHUNKS, k_chunk or 0), None
        runtime.status = replace(
            runtime.status,
            k_chunk=chunks,
            slowdown_percent=slowdown,
            budget_percent=None if k_chunk is not None else budget,
        )

    async def tune(self, request: TuneRequest) -> AsyncIterator[Progress]:
        self._check()
        runtime = self.runtime
        runtime.calls.append(("tune", request))
        reloads = (request.budget == EXACT) != runtime.status.exact
        try:
            async with runtime.turn:
                runtime.status = replace(runtime.status, state="loading" if reloads else runtime.status.state)
                for step in range(4):
                    yield Progress(
                        phase="tune", done=step, total=4, unit="layer types", message=f"timing {[*CHUNKS][step]}"
                    )
                    await asyncio.sleep(runtime.tune_delay_s)
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("tune")
            runtime.status = DEAD if reloads else runtime.status
            raise
        runtime.status = replace(runtime.status, state="ready")
        if runtime.tune_error:
            raise ClientError(runtime.tune_error)
        self._compensate(request)

    async def device(self) -> DeviceReport:
        self._check()
        runtime = self.runtime
        return DeviceReport(
            machine={**runtime.machine, "memory": {**MACHINE["memory"], "available_bytes": runtime.free_bytes}},
            bandwidth_gb_s=41.3,
            tuning=runtime.tuning,
            problems=tuple(runtime.problems),
        )

    async def prospects(self) -> Sequence[Prospect]:
        self._check()
        if not self.runtime.shelf:
            return ()
        from runtime.load.prospects import prospects, room_of

        return prospects(CATALOGUE, room_of(await self.device(), self.runtime.status))

    async def quantize(self, request: QuantizeRequest) -> AsyncIterator[Progress]:
        self._check()
        runtime = self.runtime
        runtime.calls.append(("quantize", request))
        try:
            for block in range(4):
                yield Progress(phase="quantize", done=block, total=4, unit="blocks", message=f"block {block}")
                await asyncio.sleep(runtime.load_delay_s)
            if runtime.load_gate is not None:
                await runtime.load_gate.wait()
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("quantize")
            raise
        name = request.name or request.source.rpartition("/")[2]
        runtime.entries.append(entry(name, bits=request.bits, perplexity_before=12.3, perplexity_after=12.8))
        yield replace(DONE, message=name)

    async def inspect(self, request: InspectRequest) -> AsyncIterator[Progress | Inspection]:
        self._check()
        self.runtime.calls.append(("inspect", request))
        if self.runtime.inspect_error:
            raise ClientError(self.runtime.inspect_error)
        yield Progress(phase="inspect", done=1, total=2, unit="tokens", message="reading the answer")
        yield self.runtime.inspection or inspected(request.answer)

    async def remove(self, name: str) -> None:
        self._check()
        self.runtime.calls.append(("remove", name))
        self.runtime.entries = [entry for entry in self.runtime.entries if entry.name != name]

    async def caches(self) -> Caches:
        self._check()
        return Caches(
            files=self.runtime.saved.files,
            bytes=self.runtime.saved.bytes,
            kinds=CACHES if self.runtime.status.model else {},
        )

    async def forget(self, chat: str | None = None) -> Holding:
        self._check()
        self.runtime.calls.append(("forget", chat))
        if self.runtime.forget_error:
            error, self.runtime.forget_error = self.runtime.forget_error, None
            raise ClientError(error)
        gone, self.runtime.saved = self.runtime.saved, Holding()
        return gone

    async def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> AsyncIterator[ChatDelta]:
        self._check()
        runtime = self.runtime
        number = len(runtime.named("chat"))
        runtime.calls.append(("chat", (list(messages), options)))
        if runtime.too_long:
            runtime.too_long -= 1
            raise ContextLengthError("the prompt is too long", status=400)
        text = runtime.answers[min(number, len(runtime.answers) - 1)]
        text, *called = text.split("\nCALL ")  # a line `CALL name {"argument": 1}` is a call
        pieces = re.findall(r"\s*\S+|\s+$", text)
        try:
            async with runtime.turn:
                for at, piece in enumerate(pieces):
                    if at == runtime.hold_after:
                        runtime.hold_after = None
                        await runtime.released.wait()
                    if at == runtime.crash_after:
                        runtime.crash_after = None
                        runtime.die()
                        raise GoneError("the connection was closed")
                    if runtime.fail_with and at == runtime.fail_after:
                        error, runtime.fail_with = runtime.fail_with, None
                        raise ClientError(error)
                    yield ChatDelta(text=piece, model=runtime.answers_as or options.model)
                    await asyncio.sleep(runtime.delay_s)
                for at, line in enumerate(called):
                    name, _, arguments = line.partition(" ")
                    yield ChatDelta(text="", calls=[CallDelta(index=at, id=f"id{number}-{at}", name=name)])
                    for piece in re.findall(r".{1,7}", arguments):
                        yield ChatDelta(text="", calls=[CallDelta(index=at, arguments=piece)])
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("chat")
            raise
        status = runtime.status
        timings = replace(runtime.timings, k_chunk=status.k_chunk, slowdown_percent=status.slowdown_percent)
        yield ChatDelta(text="", finish_reason=runtime.finish_reason, timings=timings)


class Supervisor:
    """Starts and ends the script."""

    remedy = "restarting it"

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def ensure(self) -> Client:
        if self.runtime.start_error:
            raise ClientError(self.runtime.start_error)
        self.runtime.starts += 1
        self.runtime.alive = True
        return Client(self.runtime)

    async def restart(self) -> Client:
        self.runtime.die()
        return await self.ensure()

    def crash_report(self) -> str | None:
        return None if self.runtime.alive else "the runtime was ended by SIGKILL:\nlast line of its log"

    async def close(self) -> None:
        self.runtime.closed += 1
        self.runtime.die()


FIXED_TIME = datetime(2026, 1, 2, 10, 42, tzinfo=UTC)


def make_app(runtime: Runtime, *, kept: Path | None = None, **settings: Any) -> ChatApp:
    """The application with a scripted runtime; `demo` is loaded unless told otherwise. `kept` is the chats' file."""
    values = Settings(**({"model": "demo"} | settings))
    app = ChatApp(values, supervisor=lambda: Supervisor(runtime), history=kept, now=lambda: FIXED_TIME)
    app.animation_level = "none"
    return app


async def idle(_least: float = 0.0, most: float = 1.0) -> None:
    """Wait until the event loop has had nothing to do three times in a row, at most `most` seconds.

    Textual's own function for this measures processor time, which takes 20 ms at least, and a second beside threads.
    """
    loop: Any = asyncio.get_running_loop()
    end, quiet = time.monotonic() + most, 0
    while quiet < 3 and time.monotonic() < end:
        await asyncio.sleep(0.002)
        quiet = 0 if loop._ready else quiet + 1


async def emptied(_pilot: Any, most: float = 1.0) -> bool:
    """Wait until no task of the event loop can go on: all widgets have done what was sent to them, and what that sent.

    Pilot's own function sends a message to every widget of the screen; that of the settings has four hundred.
    """
    loop: Any = asyncio.get_running_loop()
    end = time.monotonic() + most
    while True:
        await asyncio.sleep(0)
        if not loop._ready or time.monotonic() > end:
            return True


class Stage:
    """A running application, its script, and ways to act and to wait."""

    def __init__(self, app: ChatApp, pilot: Any, runtime: Runtime) -> None:
        self.app = app
        self.pilot = pilot
        self.runtime = runtime

    @property
    def composer(self) -> Any:
        return self.app.chat.composer

    @property
    def transcript(self) -> Any:
        return self.app.chat.transcript

    @property
    def last(self) -> Any:
        return self.app.session.conversation.path()[-1]

    async def until(self, predicate: Callable[[], object], what: str = "") -> None:
        """Wait until something holds; fails after ten seconds."""
        for _ in range(1000):
            if predicate():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"waited in vain for {what or predicate}; the terminal shows\n{self.screen_text()}")

    async def shows(self, *texts: str) -> None:
        """Wait until the terminal shows each text."""
        for text in texts:
            await self.until(lambda text=text: text in self.screen_text(), f"{text!r} on the screen")

    async def hides(self, *texts: str) -> None:
        """Wait until the terminal does not show each text."""
        for text in texts:
            await self.until(lambda text=text: text not in self.screen_text(), f"{text!r} to go from the screen")

    async def ready(self) -> None:
        await self.until(lambda: self.app.session.ready and not self.app.session.working, "a loaded model")

    async def ask(self, text: str) -> None:
        """Send a prompt, without waiting for the answer."""
        before = len(self.app.session.conversation)
        self.composer.focus()
        await self.until(lambda: self.app.focused is self.composer, "the composer to have the keys")
        self.composer.load_text(text)
        await self.settled()
        await self.pilot.press("enter")
        await self.until(lambda: len(self.app.session.conversation) > before, "the prompt to be sent")

    async def open(self, screen: type, *keys: str) -> None:
        """Press keys, and wait for the screen or dialog that they open."""
        await self.pilot.press(*keys)
        await self.until(lambda: isinstance(self.app.screen, screen), screen.__name__)

    async def click(self, *target: Any, **how: Any) -> None:
        """Click where a widget is once everything is drawn; arguments as those of the pilot's own click."""
        await self.settled()
        await self.pilot.click(*target, **how)

    async def say(self, *prompts: str) -> None:
        """Send prompts, each when the one before has its answer, and wait for the last answer."""
        for prompt in prompts:
            await self.ask(prompt)
            await self.answered()

    async def answered(self) -> None:
        await self.until(
            lambda: self.app.session.conversation.head and self.last.state != "streaming" and not self.app.chat.busy,
            "the end of the answer",
        )
        await self.settled()

    async def settled(self) -> None:
        """Wait until the widgets have done what was sent to them, and what that sent to others, and it is drawn."""
        for _ in range(3):
            await self.pilot.pause()

    def screen_text(self) -> str:
        """What the terminal shows."""
        return "\n".join(
            "".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()
        )


@pytest.fixture(autouse=True)
def waits_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pilot waits by `idle` and `emptied`."""
    monkeypatch.setattr(textual.pilot.Pilot, "_wait_for_screen", emptied)
    monkeypatch.setattr(textual.pilot, "wait_for_idle", idle)
    monkeypatch.setattr(textual.app, "wait_for_idle", idle)


@pytest.fixture(autouse=True)
def types_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialogs that open by themselves take keys at once; test_tools.py types into them."""
    monkeypatch.setattr("app.tui.screens.dialogs.CALM_S", -math.inf)
    monkeypatch.setattr("app.tui.screens.dialogs.ALONE_S", 0)


@pytest.fixture(autouse=True)
def hashes_rules_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Textual does, but not through Python: a million times where a test opens a screen of many widgets."""
    monkeypatch.setattr(RuleSet, "__hash__", object.__hash__)


@pytest.fixture(scope="session")
def _parsed_styles() -> dict[Any, list[RuleSet]]:
    return {}


@pytest.fixture(autouse=True)
def parses_styles_once(monkeypatch: pytest.MonkeyPatch, _parsed_styles: dict[Any, list[RuleSet]]) -> None:
    """All starts share the parsed style sheets: parsing took an eighth of each."""
    parse = Stylesheet._parse_rules

    def parsed(sheet: Stylesheet, *args: Any, **options: Any) -> list[RuleSet]:
        key = (args, *options.items(), frozenset(sheet._variables.items()))
        if key not in _parsed_styles:
            _parsed_styles[key] = parse(sheet, *args, **options)
        return _parsed_styles[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parsed)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def stage() -> Callable[..., Any]:
    """`async with stage(runtime, size=(w, h), **settings) as s:` runs the application under Pilot.

    It begins when a model is loaded; with `ready=False`, at once.
    """

    @asynccontextmanager
    async def run(
        runtime: Runtime,
        size: tuple[int, int] = (80, 24),
        *,
        ready: bool = True,
        notices: bool = False,
        **settings: Any,
    ) -> AsyncIterator[Stage]:
        app = make_app(runtime, **settings)
        async with app.run_test(size=size, notifications=notices) as pilot:
            scene = Stage(app, pilot, runtime)
            scene.composer.cursor_blink = False
            if ready:
                await scene.ready()
            yield scene

    return run


@pytest.fixture
def served() -> Callable[..., None]:
    """`served("good", ...)` writes mcp.json with servers of `hostile.py`; new chats use their tools."""

    def write(*kinds: str, use: bool = True) -> None:
        file = paths.settings_file().with_name("mcp.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        servers = {kind: {"command": sys.executable, "args": [str(HOSTILE), kind]} for kind in kinds}
        file.write_text(json.dumps({"mcpServers": servers}))
        usual = [f"{kind}/{name}" for kind in kinds for name in ("echo", "write")] if use else []
        file.with_name("tools.json").write_text(json.dumps({"usual": usual}))

    return write


@pytest.fixture(autouse=True)
def _never_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the screen changes when something happens, not at the next look at the runtime."""
    monkeypatch.setattr("app.tui.app.CHECK_INTERVAL_S", 3600.0)
