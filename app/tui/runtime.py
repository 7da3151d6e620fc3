"""What the UI asks of the runtime, as protocols.

`app.supervisor` and `app.client` fulfil them, and so do scripts in tests, which need no process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from app.protocol import ChatDelta, ChatOptions
    from models.progress import Progress
    from runtime.wire.answers import Caches, Holding, ModelEntry, Status
    from runtime.wire.device import DeviceReport
    from runtime.wire.inspection import Inspection, InspectRequest
    from runtime.wire.prospects import Prospect
    from runtime.wire.requests import LoadRequest, QuantizeRequest, TuneRequest


class ClientLike(Protocol):
    """A connection to a runtime. Closing an iterator cancels the work behind it."""

    async def status(self) -> Status:
        """What it is doing."""

    async def models(self) -> Sequence[ModelEntry]:
        """The stored models."""

    def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Load a model."""

    def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:
        """Apply a budget, or a k_chunk, to the loaded model."""

    async def prospects(self) -> Sequence[Prospect]:
        """The models that can be fetched, seen from this machine."""

    async def device(self) -> DeviceReport:
        """The device, and how the loaded model was tuned to it."""

    def quantize(self, request: QuantizeRequest) -> AsyncGenerator[Progress, None]:
        """Make a low-bit model of a checkpoint."""

    def chat(self, messages: Sequence[Mapping[str, str]], options: ChatOptions) -> AsyncGenerator[ChatDelta, None]:
        """Answer a conversation."""

    def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """What the model thought at each token of an answer."""

    async def remove(self, name: str) -> None:
        """Delete a stored model."""

    async def caches(self) -> Caches:
        """What is on disk of conversations' caches, and what each kind of cache means for the loaded model."""

    async def forget(self, chat: str | None = None) -> Holding:
        """Delete what memory and disk hold of a conversation, or of all. Returns what was deleted."""


class SupervisorLike(Protocol):
    """Starts a runtime process, or finds one, and ends what it started."""

    remedy: str
    """What comes after a runtime that was lost, in words behind the reason."""

    async def ensure(self) -> ClientLike:
        """A connection to a runtime that runs."""

    async def restart(self) -> ClientLike:
        """A connection to a new one."""

    async def close(self) -> None:
        """End what was started."""

    def crash_report(self) -> str | None:
        """How the process that was started ended; None while it runs."""
