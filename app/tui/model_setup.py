"""Setting up a model: download, quantize, load and tune it as one job. Independent of widgets.

The request is stored until the job is done, so that a user who quits can resume it next time. Download and
quantization continue where they stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from app import paths
from app.errors import BusyError
from app.language import _
from app.tui.jobs import STAGES
from models.files import private_folder

if TYPE_CHECKING:
    from app.tui.runtime import ClientLike
    from models.progress import Progress
    from runtime.wire.requests import QuantizeRequest

_FILE = "unfinished.json"
_ENDING_S, _AGAIN_S = 60.0, 0.5
"""How long stopped work may take to end, and the interval between retries, in seconds."""


class ModelSetup:
    """The job that sets up one model."""

    def __init__(
        self,
        client: ClientLike,
        request: QuantizeRequest,
        load: Callable[[str], AsyncGenerator[Progress, None]],
        wanted: Callable[[], bool],
    ) -> None:
        """Prepare the job without starting it.

        Args:
            client: The runtime.
            request: The model to make.
            load: Loads a model by name.
            wanted: Whether to load the model; called once it is made.
        """
        self.request = request
        self.made: str | None = None
        """The model's name, once it is made."""
        self.loaded = False
        """Whether it is loaded."""
        self._client, self._load, self._wanted = client, load, wanted

    @property
    def title(self) -> str:
        """The job's title."""
        return title_of(self.request)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of the job."""
        return STAGES[1:] if Path(self.request.source).exists() else STAGES

    async def reports(self) -> AsyncGenerator[Progress, None]:
        """Run the job. Closing the iterator stops it."""
        _write(self.request)
        async with aclosing(self._making()) as making:
            async for progress in making:
                if progress.phase == "done":
                    self.made = progress.message or self.request.name
                else:
                    yield progress
        forget()
        if self.made is not None and self._wanted():
            async with aclosing(self._load(self.made)) as loading:
                async for progress in loading:
                    yield progress
            self.loaded = True

    async def _making(self) -> AsyncGenerator[Progress, None]:
        """Download and quantize. Work that was stopped a moment ago may have to end first."""
        from models.progress import Progress

        until = time.monotonic() + _ENDING_S
        while True:
            try:
                async with aclosing(self._client.quantize(self.request)) as making:
                    async for progress in making:
                        yield progress
                return
            except BusyError:
                if time.monotonic() > until:
                    raise
            message = _("waiting for other work to end")
            yield Progress(phase="wait", done=0, total=None, unit="", message=message)
            await asyncio.sleep(_AGAIN_S)


def title_of(request: QuantizeRequest) -> str:
    """The title of the job for a request."""
    name = request.source.rstrip("/").rpartition("/")[2]
    if request.keep:  # only the file tells its bits
        return _("Preparing {name}", name=name)
    if Path(request.source).expanduser().exists():
        return _("Preparing {name} at {bits:g} bits", name=name, bits=request.bits)
    return _("Getting {name} at {bits:g} bits", name=name, bits=request.bits)


def unfinished() -> QuantizeRequest | None:
    """The stored request that was never finished; None if there is none that this version understands."""
    from runtime.wire.codec import from_json
    from runtime.wire.requests import QuantizeRequest

    try:
        return from_json(QuantizeRequest, json.loads(_file().read_text(encoding="utf-8")), strict=True)
    except (OSError, ValueError, RecursionError):  # a WireError is a ValueError
        return None


def forget() -> None:
    """Delete the stored request."""
    with contextlib.suppress(OSError):
        _file().unlink(missing_ok=True)


def _write(request: QuantizeRequest) -> None:
    """Store a request. If that fails, the job cannot be resumed later, which is harmless."""
    from runtime.wire.codec import to_json

    with contextlib.suppress(OSError):
        private_folder(_file().parent)
        _file().write_text(json.dumps(to_json(request)), encoding="utf-8")


def _file() -> Path:
    return paths.home() / _FILE
