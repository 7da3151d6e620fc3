"""A scripted runtime for the terminal UI: it streams given text at a given rate, fails, crashes, is slow to load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from app.errors import ClientError
from app.protocol import CacheFacts, Caches, DeviceProblem, DeviceReport, KneeCurve, SavedCaches, Tuning
from app.settings import Settings
from app.tui.app import ChatApp

MEGABYTE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Status:
    state: str = "empty"
    model: str | None = None
    backend: str | None = "cpu"
    reason: str | None = "no GPU was found"
    bits: float | None = None
    kv: str | None = "fp16"
    k_chunk: Mapping[str, int] | None = None
    budget_percent: float | None = None
    slowdown_percent: float | None = None
    n_tb: Mapping[str, int] | None = None
    context: int | None = None
    memory_bytes: int | None = 120 * MEGABYTE


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    bits: float = 4.0
    disk_bytes: int = 12 * MEGABYTE
    method: str = "rtn"
    smooth_attention: bool = False
    bundled: bool = False
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    warning: str | None = None
    loaded: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    phase: str
    done: float = 0
    total: float | None = None
    unit: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Timings:
    ttft_s: float | None = 0.21
    decode_tokens_per_s: float | None = 58.1
    prompt_tokens: int = 888
    completion_tokens: int = 412
    k_chunk: Mapping[str, int] | None = None
    slowdown_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class Delta:
    text: str = ""
    finish_reason: str | None = None
    timings: Timings | None = None


MACHINE = {
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


def tuned(budget: float) -> Tuning:
    """What the scripted tuner finds."""
    chunks = {kind: round(k * budget / 5) for kind, k in CHUNKS.items()}
    knees = tuple(
        KneeCurve(kind=kind, n_tb=0, points=tuple((k, 1 + max(0, k - at) * 0.004) for k in range(0, 129, 8)))
        for kind, at in chunks.items()
        if at
    )
    return Tuning(
        device="Example 7840U", budget_percent=budget, n_tb_max=None, n_tb={}, k_chunk=chunks,
        predicted_slowdown_percent=budget * 0.92, measured_slowdown_percent=budget * 0.84, seconds=42.0,
        date="2026-11-21T16:40:00+00:00", curve=knees,
    )  # fmt: skip


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
    """A load does not end before it is set."""
    dies_while_loading: bool = False
    """The process is gone at the next step of a load, once."""
    start_error: str | None = None
    tune_delay_s: float = 0.0
    """Between two reports of tuning."""
    tune_error: str | None = None
    tuning: Tuning | None = None
    untunable: DeviceProblem | None = None
    """Why budgets have no effect."""
    problems: list[DeviceProblem] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Answers and tunings wait for each other."""
    timings: Timings = field(default_factory=Timings)
    entries: list[Entry] = field(
        default_factory=lambda: [Entry(name="demo", bundled=True), Entry(name="tiny-3bit", bits=3.0)]
    )
    context: int = 8192
    alive: bool = False
    status: Status = field(default_factory=Status)
    starts: int = 0
    closed: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    hold_after: int | None = None
    """Pieces after which the answer hangs until it is stopped, or `released`, once."""
    saved: SavedCaches = field(default_factory=lambda: SavedCaches(files=2, bytes=34 * MEGABYTE))
    """What is on disk of chats."""
    forget_error: str | None = None
    """Why nothing can be forgotten, once."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets the answer that hangs go on."""

    def named(self, what: str) -> list[Any]:
        """The arguments of all calls of one kind."""
        return [arguments for name, arguments in self.calls if name == what]

    def die(self) -> None:
        """The process is gone."""
        self.alive = False
        self.status = Status()


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

    async def models(self) -> Sequence[Entry]:
        self._check()
        loaded = self.runtime.status.model
        return [replace(entry, loaded=entry.name == loaded) for entry in self.runtime.entries]

    async def load(self, model: str, **options: Any) -> AsyncIterator[Report]:
        self._check()
        runtime = self.runtime
        runtime.calls.append(("load", (model, options)))
        try:
            for step in range(runtime.load_steps):
                yield Report(
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
        entry = next((entry for entry in runtime.entries if entry.name == model), None)
        if entry is None:
            raise ClientError(f"there is no model {model!r}")
        runtime.status = Status(
            state="ready", model=model, bits=entry.bits, kv=options.get("kv", "fp16"), memory_bytes=812 * MEGABYTE,
            context=options.get("context") or runtime.context,
        )  # fmt: skip
        self._compensate(options.get("budget"), options.get("k_chunk"))
        yield Report(phase="done")

    def _compensate(self, budget: float | None, k_chunk: int | None) -> None:
        runtime = self.runtime
        budget = 5.0 if budget is None else budget
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

    async def tune(
        self, budget: float | None = None, force: bool = False, *, k_chunk: int | None = None
    ) -> AsyncIterator[Report]:
        self._check()
        runtime = self.runtime
        runtime.calls.append(("tune", {"budget": budget, "force": force, "k_chunk": k_chunk}))
        try:
            async with runtime.turn:
                for step in range(4):
                    yield Report(
                        phase="tune", done=step, total=4, unit="layer types", message=f"timing {[*CHUNKS][step]}"
                    )
                    await asyncio.sleep(runtime.tune_delay_s)
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("tune")
            raise
        if runtime.tune_error:
            raise ClientError(runtime.tune_error)
        self._compensate(budget, k_chunk)

    async def device(self) -> DeviceReport:
        self._check()
        runtime = self.runtime
        return DeviceReport(
            machine=MACHINE,
            bandwidth_gb_s=41.3,
            tuning=runtime.tuning,
            problems=tuple(runtime.problems),
        )

    async def quantize(self, source: str, **options: Any) -> AsyncIterator[Report]:
        self._check()
        runtime = self.runtime
        runtime.calls.append(("quantize", (source, options)))
        try:
            for block in range(4):
                yield Report(phase="quantize", done=block, total=4, unit="blocks", message=f"block {block}")
                await asyncio.sleep(runtime.load_delay_s)
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("quantize")
            raise
        name = source.rpartition("/")[2]
        runtime.entries.append(
            Entry(name=name, bits=options["bits"], perplexity_before=12.3, perplexity_after=12.8, warning=None)
        )
        yield Report(phase="done")

    async def remove(self, name: str) -> None:
        self._check()
        self.runtime.calls.append(("remove", name))
        self.runtime.entries = [entry for entry in self.runtime.entries if entry.name != name]

    async def caches(self) -> Caches:
        self._check()
        return Caches(saved=self.runtime.saved, kinds=CACHES if self.runtime.status.model else {})

    async def forget(self, chat: str | None = None) -> SavedCaches:
        self._check()
        self.runtime.calls.append(("forget", chat))
        if self.runtime.forget_error:
            error, self.runtime.forget_error = self.runtime.forget_error, None
            raise ClientError(error)
        gone, self.runtime.saved = self.runtime.saved, SavedCaches(files=0, bytes=0)
        return gone

    async def chat(self, messages: Sequence[Mapping[str, str]], options: Any) -> AsyncIterator[Delta]:
        self._check()
        runtime = self.runtime
        number = len(runtime.named("chat"))
        runtime.calls.append(("chat", (list(messages), options)))
        text = runtime.answers[min(number, len(runtime.answers) - 1)]
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
                    yield Delta(text=piece)
                    await asyncio.sleep(runtime.delay_s)
        except (asyncio.CancelledError, GeneratorExit):
            runtime.cancelled.append("chat")
            raise
        status = runtime.status
        timings = replace(runtime.timings, k_chunk=status.k_chunk, slowdown_percent=status.slowdown_percent)
        yield Delta(finish_reason="stop", timings=timings)


class Supervisor:
    """Starts and ends the script."""

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


def make_app(runtime: Runtime, **settings: Any) -> ChatApp:
    """The application with a scripted runtime; `demo` is loaded unless told otherwise."""
    values = Settings(**({"model": "demo"} | settings))
    app = ChatApp(values, supervisor=lambda: Supervisor(runtime), now=lambda: FIXED_TIME)
    app.animation_level = "none"
    return app


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

    async def shows(self, text: str) -> None:
        """Wait until the terminal shows a text."""
        await self.until(lambda: text in self.screen_text(), f"{text!r} on the screen")

    async def hides(self, text: str) -> None:
        """Wait until the terminal does not show a text."""
        await self.until(lambda: text not in self.screen_text(), f"{text!r} to go from the screen")

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

    async def answered(self) -> None:
        await self.until(
            lambda: self.app.session.conversation.head and self.last.state != "streaming" and not self.app.chat.busy,
            "the end of the answer",
        )
        await self.settled()

    async def settled(self) -> None:
        """Wait until the widgets have done what was sent to them, and what that sent to others, and it is drawn.

        Pilot's own pause only looks whether the process is idle, which it also seems to be while others have the CPU.
        """
        for _ in range(3):
            await self.pilot._wait_for_screen()
            await self.pilot.pause()

    def screen_text(self) -> str:
        """What the terminal shows."""
        return "\n".join(
            "".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()
        )


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def tuned_to() -> Callable[[float], Tuning]:
    """What the scripted tuner finds for a budget."""
    return tuned


@pytest.fixture
def stage() -> Callable[..., Any]:
    """`async with stage(runtime, size=(w, h), **settings) as s:` runs the application under Pilot."""

    @asynccontextmanager
    async def run(runtime: Runtime, size: tuple[int, int] = (80, 24), **settings: Any) -> AsyncIterator[Stage]:
        app = make_app(runtime, **settings)
        async with app.run_test(size=size) as pilot:
            scene = Stage(app, pilot, runtime)
            scene.composer.cursor_blink = False
            yield scene

    return run


@pytest.fixture
def app_of() -> Callable[..., ChatApp]:
    """`app_of(runtime, **settings)` makes an application that does not run yet."""
    return make_app
