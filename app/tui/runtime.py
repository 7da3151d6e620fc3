"""What the UI asks of the runtime, as protocols.

`app.supervisor` and `app.client` fulfil them, and so do scripts in tests, which need no process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol


class StatusLike(Protocol):
    """What the runtime is doing and with what."""

    @property
    def state(self) -> str:
        """`empty`, `loading`, `ready`, `generating` or `failed`."""

    @property
    def model(self) -> str | None:
        """Name of the loaded model."""

    @property
    def backend(self) -> str | None:
        """`cpu` or `reference`."""

    @property
    def reason(self) -> str | None:
        """Why that backend was chosen."""

    @property
    def bits(self) -> float | None:
        """Bits of a weight."""

    @property
    def kv(self) -> str | None:
        """Precision of the key-value cache."""

    @property
    def k_chunk(self) -> Mapping[str, int] | None:
        """Compensated channels per 1024, by layer type."""

    @property
    def budget_percent(self) -> float | None:
        """Slowdown that compensation may cost; None where k_chunk was given instead."""

    @property
    def slowdown_percent(self) -> float | None:
        """The slowdown that was measured."""

    @property
    def n_tb(self) -> Mapping[str, int] | None:
        """Thread blocks of the compensation, by layer type; None where blocks mean nothing."""

    @property
    def context(self) -> int | None:
        """Tokens that fit."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the runtime process."""


class ModelEntryLike(Protocol):
    """A stored model, as the models screen lists it."""

    @property
    def name(self) -> str:
        """Its name in the store."""

    @property
    def bits(self) -> float:
        """Bits of a weight, as asked for."""

    @property
    def disk_bytes(self) -> int:
        """Space on disk."""

    @property
    def method(self) -> str:
        """Base quantizer."""

    @property
    def smooth_attention(self) -> bool:
        """Whether its keys were evened out for a cache of few bits."""

    @property
    def bundled(self) -> bool:
        """Whether it belongs to the program."""

    @property
    def perplexity_before(self) -> float | None:
        """In full precision, on the bundled text."""

    @property
    def perplexity_after(self) -> float | None:
        """Quantized, on the same text."""

    @property
    def warning(self) -> str | None:
        """What is wrong with its quality."""

    @property
    def loaded(self) -> bool:
        """Whether it is the one that runs."""


class SavedLike(Protocol):
    """What is on disk of conversations' caches."""

    @property
    def files(self) -> int:
        """How many files."""

    @property
    def bytes(self) -> int:
        """What they take."""


class CacheFactsLike(Protocol):
    """What a kind of KV cache would mean for the loaded model."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token."""

    @property
    def context(self) -> int:
        """Tokens that fit."""


class CachesLike(Protocol):
    """Caches of conversations."""

    @property
    def saved(self) -> SavedLike:
        """What is on disk."""

    @property
    def kinds(self) -> Mapping[str, CacheFactsLike]:
        """What every kind of KV cache would mean for the loaded model; empty where none is loaded."""


class ProgressLike(Protocol):
    """How far a long piece of work is."""

    @property
    def phase(self) -> str:
        """What is being done, one word."""

    @property
    def done(self) -> float:
        """In `unit`."""

    @property
    def total(self) -> float | None:
        """In `unit`; None where it is not known."""

    @property
    def unit(self) -> str:
        """`bytes`, `blocks`, ..."""

    @property
    def message(self) -> str:
        """The same for a person."""


class TimingsLike(Protocol):
    """What an answer cost."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Speed after it."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""

    @property
    def k_chunk(self) -> Mapping[str, int] | None:
        """Compensated channels per 1024, by layer type."""

    @property
    def slowdown_percent(self) -> float | None:
        """By how much that slowed it down, where it was measured."""


class ChatDeltaLike(Protocol):
    """A piece of an answer."""

    @property
    def text(self) -> str:
        """May be empty."""

    @property
    def finish_reason(self) -> str | None:
        """Set with the last piece."""

    @property
    def timings(self) -> TimingsLike | None:
        """Set with the last piece."""


class CurveLike(Protocol):
    """How the time of one layer type grows with k_chunk."""

    @property
    def kind(self) -> str:
        """The layer type."""

    @property
    def n_tb(self) -> int:
        """Thread blocks; 0 where they mean nothing."""

    @property
    def points(self) -> Sequence[tuple[int, float]]:
        """(k_chunk, time relative to none), k_chunk ascending."""


class TuningLike(Protocol):
    """What the tuner found for the loaded model."""

    @property
    def device(self) -> str:
        """What it was found on."""

    @property
    def budget_percent(self) -> float:
        """Slowdown that was allowed."""

    @property
    def n_tb(self) -> Mapping[str, int]:
        """Thread blocks by layer type; empty or zero where they mean nothing."""

    @property
    def k_chunk(self) -> Mapping[str, int]:
        """Compensated channels per 1024, by layer type."""

    @property
    def predicted_slowdown_percent(self) -> float:
        """From the times of the layers."""

    @property
    def measured_slowdown_percent(self) -> float | None:
        """Of whole decoding steps."""

    @property
    def seconds(self) -> float:
        """How long tuning took."""

    @property
    def date(self) -> str:
        """When, in UTC; empty where nothing was tuned."""

    @property
    def curve(self) -> Sequence[CurveLike]:
        """Its knee curves."""


class ProblemLike(Protocol):
    """Something that is wrong with the device."""

    @property
    def what(self) -> str:
        """What is wrong, in one line."""

    @property
    def fix(self) -> str:
        """What to do about it."""


class DeviceReportLike(Protocol):
    """The device that runs models."""

    @property
    def machine(self) -> Mapping[str, Any]:
        """What was detected, as `lowbit-chat doctor --json` has it."""

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Measured read bandwidth of the memory."""

    @property
    def tuning(self) -> TuningLike | None:
        """How the loaded model was tuned; None where it was not."""

    @property
    def problems(self) -> Sequence[ProblemLike]:
        """What is wrong."""


class ClientLike(Protocol):
    """A connection to a runtime. Closing an iterator cancels the work behind it."""

    async def status(self) -> StatusLike:
        """What it is doing."""

    async def models(self) -> Sequence[ModelEntryLike]:
        """The stored models."""

    def load(self, model: str, **options: Any) -> AsyncGenerator[ProgressLike, None]:
        """Load a model, with `kv`, `k_chunk`, `budget`, `context`, `backend`."""

    def tune(
        self, budget: float | None = None, force: bool = False, *, k_chunk: int | None = None
    ) -> AsyncGenerator[ProgressLike, None]:
        """Apply a budget in percent, or a k_chunk, to the loaded model."""

    async def device(self) -> DeviceReportLike:
        """The device, and how the loaded model was tuned to it."""

    def quantize(self, source: str, **options: Any) -> AsyncGenerator[ProgressLike, None]:
        """Make a low-bit model of a checkpoint folder, with `bits`, `method`, `smooth_attention`."""

    def chat(self, messages: Sequence[Mapping[str, str]], options: Any) -> AsyncGenerator[ChatDeltaLike, None]:
        """Answer a conversation; `options` is an `app.client.ChatOptions`."""

    async def remove(self, name: str) -> None:
        """Delete a stored model."""

    async def caches(self) -> CachesLike:
        """What is on disk of conversations' caches, and what each kind of cache means for the loaded model."""

    async def forget(self, chat: str | None = None) -> SavedLike:
        """Delete what memory and disk hold of a conversation, or of all. Returns what was deleted."""


class SupervisorLike(Protocol):
    """Starts a runtime process, or finds one, and ends what it started."""

    async def ensure(self) -> ClientLike:
        """A connection to a runtime that runs."""

    async def restart(self) -> ClientLike:
        """A connection to a new one."""

    async def close(self) -> None:
        """End what was started."""

    def crash_report(self) -> str | None:
        """How the process that was started ended; None while it runs."""
