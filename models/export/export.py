"""`export`: writes a stored model for another program, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from models.errors import CancelledError, StoreError
from models.export import ExportFormat
from models.progress import Cancelled, Progress, ProgressCallback, ignore_progress, never_cancelled
from models.store import StoredModel
from models.store.durable import explained, move_folder, remove_folder, sync_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    bytes: int
    weights: dict[str, int]
    """Number of weights of matrices by the type that holds them, most first."""
    notes: tuple[str, ...]
    """What differs from the stored model, one sentence each."""


def default_target(name: str, kind: ExportFormat) -> Path:
    """Where a model is exported to unless a path is given: `name-awq`, or `name.gguf`, in the current folder."""
    base = name.rpartition("/")[2]
    return Path(f"{base}.gguf" if kind == "gguf" else f"{base}-{kind}")


def export(
    model: StoredModel,
    target: Path,
    kind: ExportFormat,
    *,
    residuals: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Cancelled = never_cancelled,
) -> Exported:
    """Write a stored model in another program's format.

    Args:
        model: The model.
        target: The file (`gguf`) or folder to make; it must not exist.
        kind: The format.
        residuals: Whether to write the weights with all residuals added, rounded anew, instead of the low-bit ones.
        progress: Receives a report after each matrix.
        cancelled: Asked between matrices.

    Raises:
        UnsupportedModelError: the format cannot hold this model; nothing is written.
        StoreError: the target exists, or the disk refuses. Nothing remains of it.
        CancelledError: it was asked to stop. Nothing remains of it.
    """
    from models.export.folder import FolderWriter
    from models.export.gguf_file import GgufWriter

    if residuals and model.recipe.residual_bits == 0:
        raise StoreError(f"{model.name} was quantized without residuals, so none can be added; export it as it is")
    total = len(model.spec.linear_names())
    done = 0

    def step() -> None:
        nonlocal done
        if cancelled():
            raise CancelledError("the export was stopped; nothing of it is kept")
        done += 1
        progress(Progress(phase="export", done=done, total=total, unit="matrices", message=f"writing {target}"))

    # Refuses what the format cannot hold, before anything is written.
    writer = GgufWriter(model, residuals) if kind == "gguf" else FolderWriter(model, kind, residuals)
    with _in_place(target) as temporary:
        weights = writer.write(temporary, step)
        size = sum(file.stat().st_size for file in (temporary.iterdir() if temporary.is_dir() else [temporary]))
    ordered = dict(sorted(weights.items(), key=lambda item: (-item[1], item[0])))
    return Exported(path=target, bytes=size, weights=ordered, notes=tuple(writer.notes))


@contextmanager
def _in_place(target: Path) -> Iterator[Path]:
    """The name under which a file or folder is written, renamed to `target` in the end and removed after an error.

    Raises:
        StoreError: the target exists, or a file operation failed.
    """
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} exists; remove it, or give another path")
    temporary = target.with_name(f".{target.name}.partial")
    with explained(f"cannot write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_folder(temporary)
        try:
            yield temporary
            _sync(temporary)
            if target.exists():
                raise StoreError(f"{target} was created meanwhile; remove it, and export again")
            if temporary.is_dir():
                move_folder(temporary, target)
            else:
                temporary.rename(target)
                sync_folder(target.parent)
        except BaseException:
            remove_folder(temporary)
            raise


def _sync(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
