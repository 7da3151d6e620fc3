"""What MODEL means: a stored name, `demo`, a folder with a checkpoint, or a name on the hub."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.errors import CliError
from app.cli.interrupt import Interrupt
from app.cli.output import Output
from app.cli.services import DEMO, Services

if TYPE_CHECKING:
    from models.recipe import Recipe
    from models.store import StoredModel, StoredModelInfo


def open_model(name: str, services: Services, output: Output) -> StoredModel:
    """The stored model that MODEL names; made first, with progress, where it names a checkpoint not quantized yet.

    Raises:
        CliError: MODEL names nothing.
        ModelError: the model or the checkpoint is damaged or not supported.
        KeyboardInterrupt: the person stopped the work.
    """
    from models.store import Store

    if name == DEMO:
        return services.demo()
    store: Store = services.store()
    if is_stored(name, services):
        return store.open(name)
    from models.recipe import Recipe

    recipe = Recipe()
    folder = local_folder(name)
    if folder is not None:
        info = _made_from(folder, recipe, services) or _make(folder, recipe, services, output)
    elif _is_hub_name(name):
        ready = [info for info in store.list() if info.source == name and info.recipe == recipe]
        info = ready[0] if ready else _make(_hub_checkpoint(name, services, output), recipe, services, output)
    else:
        raise CliError(unknown(name, services))
    return store.open(info.name)


def find_checkpoint(name: str, services: Services, output: Output) -> Path:
    """The full-precision checkpoint that MODEL names, downloaded first where it is a hub name.

    Raises:
        CliError: MODEL names none.
        ModelError: the download failed.
        KeyboardInterrupt: the person stopped it.
    """
    if name == DEMO:
        return services.demo_checkpoint()
    folder = local_folder(name)
    if folder is not None:
        return folder
    if is_stored(name, services):
        info = services.store().info(name)
        raise CliError(
            f"{name} is a low-bit model, and this needs the full-precision checkpoint that it was made from: give its "
            f"folder or its hub name ({info.source})"
        )
    if _is_hub_name(name):
        return _hub_checkpoint(name, services, output)
    raise CliError(unknown(name, services))


def is_stored(name: str, services: Services) -> bool:
    """Whether the store has a model of this name; what can't be a name is none."""
    from models.errors import StoreError
    from models.store import check_name

    try:
        check_name(name)
    except StoreError:
        return False
    return name in services.store()


def local_folder(name: str) -> Path | None:
    """The folder that MODEL names, if it names one with a checkpoint.

    Raises:
        CliError: it is written as a path, or is a folder, but there is no checkpoint.
    """
    if not name:
        return None
    path = Path(name).expanduser()
    written_as_path = name.startswith((".", "/", "~")) or "\\" in name or path.is_absolute()
    if (path / "config.json").is_file():
        return path
    if path.is_dir() and (written_as_path or not _is_hub_name(name)):
        raise CliError(f"{name} has no config.json, so it is no Hugging Face checkpoint")
    if written_as_path:
        raise CliError(f"there is no folder {name}")
    return None


def pulled(name: str, revision: str | None, services: Services, output: Output) -> Path:
    """Download a hub checkpoint with progress, or find that the cache has the hub's present one.

    Raises:
        ModelError: the download failed.
        KeyboardInterrupt: the person stopped it; what is there is kept.
    """
    with Interrupt() as interrupt, output.progress() as progress:
        return services.pull(name, revision, progress, interrupt.cancelled)


def quantized(
    checkpoint: Path,
    recipe: Recipe,
    services: Services,
    output: Output,
    *,
    name: str | None = None,
    calibration: str | None = None,
    force: bool = False,
) -> StoredModelInfo:
    """Quantize with progress; the bundled text calibrates unless another is given.

    Raises:
        ModelError: it cannot be done.
        KeyboardInterrupt: the person stopped it; finished blocks are kept for the next time.
    """
    text = calibration if calibration is not None else services.calibration_text()
    with Interrupt() as interrupt, output.progress() as progress:
        return services.quantize(
            checkpoint,
            recipe,
            name=name,
            calibration=text,
            force=force,
            progress=progress,
            cancelled=interrupt.cancelled,
        )


def unknown(name: str, services: Services) -> str:
    """What to say of a name that means nothing."""
    names = [DEMO, *(info.name for info in services.store().list())]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names[:10])}"
    return f"there is no stored model {name!r}, and a checkpoint is named by its folder or as owner/name; {hint}"


def _is_hub_name(name: str) -> bool:
    from models.hub import is_hub_name

    return is_hub_name(name)


def _hub_checkpoint(name: str, services: Services, output: Output) -> Path:
    """The folder of a hub checkpoint; the hub is asked only where the cache has none."""
    return services.cached(name) or pulled(name, None, services, output)


def _make(checkpoint: Path, recipe: Recipe, services: Services, output: Output) -> StoredModelInfo:
    output.note(f"quantizing {checkpoint} to {recipe.bits:g} bits; this is done once")
    info = quantized(checkpoint, recipe, services, output)
    if info.summary.warning:
        output.note(info.summary.warning)
    return info


def _made_from(folder: Path, recipe: Recipe, services: Services) -> StoredModelInfo | None:
    """A stored model that was made from this folder as it is now, by this recipe."""
    from app.cli.origin import Origins

    candidates = [
        info for info in services.store().list() if info.source == folder.resolve().name and info.recipe == recipe
    ]
    origins = Origins(services.origins_file())
    return next((info for info in candidates if origins.made_from(info, folder)), None)
