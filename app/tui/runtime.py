"""Protocols of the runtime's supervisor and client, as the UI uses them.

`app.supervisor` and `app.client` implement them, and so do scripted ones in tests, which need no process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from app.protocol import ChatDelta, ChatOptions
    from models.progress import Progress
    from runtime.wire.answers import Caches, Holding, ModelEntry, Status
    from runtime.wire.device import DeviceReport, Prospect
    from runtime.wire.requests import Inspection, InspectRequest, LoadRequest, QuantizeRequest, TuneRequest


class ClientLike(Protocol):
    """A connection to a runtime. Closing an iterator cancels the work behind it."""

    async def status(self) -> Status:
        """The runtime's status."""

    async def models(self) -> Sequence[ModelEntry]:
        """The stored models."""

    def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Load a model."""

    def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:
        """Apply a budget, or a k_chunk, to the loaded model."""

    async def prospects(self) -> Sequence[Prospect]:
        """The models that can be downloaded, judged for this machine."""

    async def device(self) -> DeviceReport:
        """The device, and how the loaded model is tuned to it."""

    def quantize(self, request: QuantizeRequest) -> AsyncGenerator[Progress, None]:
        """Quantize a checkpoint."""

    def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> AsyncGenerator[ChatDelta, None]:
        """Answer a conversation."""

    def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """Inspect the model's distribution at each token of an answer."""

    async def remove(self, name: str) -> None:
        """Delete a stored model."""

    async def caches(self) -> Caches:
        """The conversations' caches on disk, and what each kind of cache costs for the loaded model."""

    async def forget(self, chat: str | None = None) -> Holding:
        """Delete the caches of one conversation, or of all. Returns what was deleted."""


class SupervisorLike(Protocol):
    """Finds or starts a runtime process, and stops what it started."""

    remedy: str
    """What happens after the runtime was lost; shown after the reason."""

    async def ensure(self) -> ClientLike:
        """A client of a running runtime."""

    async def restart(self) -> ClientLike:
        """A client of a restarted runtime."""

    async def close(self) -> None:
        """Stop what was started."""

    def crash_report(self) -> str | None:
        """How the runtime in use ended; None while its process runs."""
