"""Getting a model: fetched, made low-bit, loaded and tuned, as one piece of work. Knows no widgets.

What is asked for is written down until it is done, so that whoever quits meanwhile can go on with it next time; the
download and the quantization go on where they were.
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
from app.tui.jobs import STAGES

if TYPE_CHECKING:
    from app.tui.runtime import ClientLike
    from models.progress import Progress
    from runtime.wire.requests import QuantizeRequest

_FILE = "unfinished.json"
_ENDING_S, _AGAIN_S = 60.0, 0.5
"""How long work that was stopped may take to end, and how often is asked whether it did."""


class Getting:
    """One model on its way."""

    def __init__(
        self,
        client: ClientLike,
        request: QuantizeRequest,
        load: Callable[[str], AsyncGenerator[Progress, None]],
        wanted: Callable[[], bool],
    ) -> None:
        """Prepare; nothing is asked for yet.

        Args:
            client: The runtime.
            request: What is to be made.
            load: Loads the model of a name.
            wanted: Whether the model is to be loaded, asked once it is made.
        """
        self.request = request
        self.made: str | None = None
        """The model's name, once it is there."""
        self.loaded = False
        """Whether it runs."""
        self._client, self._load, self._wanted = client, load, wanted

    @property
    def title(self) -> str:
        """What is being done, for a person."""
        return title_of(self.request)

    @property
    def stages(self) -> tuple[str, ...]:
        """What it takes."""
        return STAGES[1:] if Path(self.request.source).exists() else STAGES

    async def reports(self) -> AsyncGenerator[Progress, None]:
        """Do it. Closing the iterator stops it."""
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
        """Fetch and quantize; what was stopped a moment ago may still have to come to its end before."""
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
            message = "waiting for other work to end"
            yield Progress(phase="wait", done=0, total=None, unit="", message=message)
            await asyncio.sleep(_AGAIN_S)


def title_of(request: QuantizeRequest) -> str:
    """What is being done, for a person."""
    return f"Getting {request.source.rstrip('/').rpartition('/')[2]} at {request.bits:g} bits"


def unfinished() -> QuantizeRequest | None:
    """What was asked for and never done; None where there is nothing, or nothing that this version understands."""
    from runtime.wire.codec import WireError, from_json
    from runtime.wire.requests import QuantizeRequest

    try:
        return from_json(QuantizeRequest, json.loads(_file().read_text(encoding="utf-8")), strict=True)
    except (OSError, ValueError, WireError):
        return None


def forget() -> None:
    """Nothing is to be gone on with."""
    with contextlib.suppress(OSError):
        _file().unlink(missing_ok=True)


def _write(request: QuantizeRequest) -> None:
    """Write down what is asked for; where that can't be done, it just is not offered again."""
    from runtime.wire.codec import to_json

    with contextlib.suppress(OSError):
        paths.private_folder(_file().parent)
        _file().write_text(json.dumps(to_json(request)), encoding="utf-8")


def _file() -> Path:
    return paths.home() / _FILE
