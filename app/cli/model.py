"""MODEL arguments: a stored name, `demo`, a checkpoint's folder or GGUF file, a short name, or a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.output import CliError, Interrupt, Output
from app.cli.services import DEMO, Services
from app.errors import hint
from app.language import _
from app.paths import links_dir
from app.reports import reported
from models.catalogue import KNOWN, SHORT_NAMES, source_of
from models.errors import MAKING, check_needed

if TYPE_CHECKING:
    from models.catalogue import KnownModel
    from models.recipe import Recipe
    from models.store import StoredModel, StoredModelInfo


def open_model(name: str, services: Services, output: Output) -> StoredModel:
    """The stored model named by MODEL; a checkpoint that is not quantized yet is quantized first, with progress.

    Raises:
        CliError: MODEL is unknown.
        ModelError: the model or the checkpoint is damaged or not supported.
        KeyboardInterrupt: the user stopped the work.
    """
    from models.store import Store

    if name == DEMO:
        return services.demo()
    store: Store = services.store()
    if is_stored(name, services):
        return store.open(name)
    path, name = local_checkpoint(name), source_of(name)
    if path is not None:
        info = _made_from(path, services) or _make(path, services, output)
    elif name in KNOWN:
        info = _made_of_known(KNOWN[name], services, output)
    elif _is_hub_name(name):
        from models.store.store import made_of_hub

        ready = [info for info in store.list() if made_of_hub(info.source, name) and _usual(info)]
        if not ready:
            check_needed(MAKING)  # before anything is downloaded
        info = ready[0] if ready else _make(_hub_checkpoint(name, services, output), services, output)
    else:
        raise CliError(unknown(name, services))
    return store.open(info.name)


def find_checkpoint(name: str, services: Services, output: Output) -> Path:
    """The checkpoint named by MODEL; short names and hub names are downloaded first.

    Raises:
        CliError: MODEL is not a checkpoint.
        ModelError: the download failed.
        KeyboardInterrupt: the user stopped it.
    """
    if name == DEMO:
        return services.demo_checkpoint()
    path = local_checkpoint(name)
    if path is not None:
        return path
    name = source_of(name)
    if name in KNOWN:
        return fetched(KNOWN[name], services, output)
    if is_stored(name, services):
        info = services.store().info(name)
        raise CliError(
            _(
                "{name} is a low-bit model, and this needs the full-precision checkpoint that it was made from: give "
                "its folder, its GGUF file or its hub name ({source})",
                name=name,
                source=info.source,
            )
        )
    if _is_hub_name(name):
        return _hub_checkpoint(name, services, output)
    raise CliError(unknown(name, services))


def is_stored(name: str, services: Services) -> bool:
    """Whether the store has a model of this name; False for invalid names."""
    from models.errors import StoreError
    from models.store import check_name

    try:
        check_name(name)
    except StoreError:
        return False
    return name in services.store()


def local_checkpoint(name: str) -> Path | None:
    """The checkpoint folder or GGUF file named by MODEL, if any.

    Raises:
        CliError: it is a path or a folder without a checkpoint.
        CheckpointError: it names a file of another program that is not there.
    """
    if not name:
        return None
    if ":" in name:
        from models.elsewhere import by_name

        if (elsewhere := by_name(name, links_dir())) is not None:
            return elsewhere
    path = Path(name).expanduser()
    written_as_path = name.startswith((".", "/", "~")) or "\\" in name or path.is_absolute() or name.endswith(".gguf")
    if (path / "config.json").is_file() or (path.is_file() and (written_as_path or name not in SHORT_NAMES)):
        return path
    if path.is_dir() and (written_as_path or not _is_hub_name(name)):
        if files := sorted(file.name for file in path.glob("*.gguf")):
            raise CliError(
                _("{name} holds GGUF files ({files}): name one of them", name=name, files=", ".join(files[:4]))
            )
        raise CliError(_("{name} has no config.json, so it is not a Hugging Face checkpoint", name=name))
    if written_as_path:
        file = name.endswith(".gguf")
        raise CliError(_("there is no file {name}", name=name) if file else _("there is no folder {name}", name=name))
    return None


def pulled(name: str, revision: str | None, services: Services, output: Output) -> Path:
    """Download a hub checkpoint with progress, unless the cache has the current one.

    Raises:
        ModelError: the download failed.
        KeyboardInterrupt: the user stopped it; the partial download is kept.
    """
    with Interrupt() as interrupt, output.progress() as progress:
        return services.pull(name, revision, progress, interrupt.cancelled)


def fetched(model: KnownModel, services: Services, output: Output) -> Path:
    """The GGUF file of a model with a short name, downloaded with progress if needed.

    Raises:
        ModelError: the download failed.
        KeyboardInterrupt: the user stopped it.
    """
    with Interrupt() as interrupt, output.progress() as progress:
        return services.fetch(model, progress, interrupt.cancelled)


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
    """Quantize with progress, calibrating on the bundled text unless another is given.

    Raises:
        ModelError: quantization failed.
        KeyboardInterrupt: the user stopped it; finished blocks are kept.
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
    """An error message about an unknown name."""
    stored = [DEMO, *(info.name for info in services.store().list())]
    short = ", ".join([*SHORT_NAMES][:4])
    listed = _("stored: {stored}; to get: {short}, ….", stored=", ".join(stored[:10]), short=short)
    return _(
        "there is no stored model {name!r}; {near} A checkpoint is named by its folder, its GGUF file or as owner/name",
        name=name,
        near=hint(name, [*stored, *SHORT_NAMES], listed),
    )


def _is_hub_name(name: str) -> bool:
    from models.hub import is_hub_name

    return is_hub_name(name)


def _hub_checkpoint(name: str, services: Services, output: Output) -> Path:
    """The folder of a hub checkpoint; contacts the hub only if the cache lacks it."""
    return services.cached(name) or pulled(name, None, services, output)


def _make(checkpoint: Path, services: Services, output: Output, name: str | None = None) -> StoredModelInfo:
    """Make a stored model; of a file whose weights are low-bit already, with these unless it has a name of ours."""
    from models.quantize import for_checkpoint
    from models.recipe import Recipe, chosen_method
    from runtime.load.plan import kept_here

    kept = None if name is not None else kept_here(checkpoint, output.note)
    if kept is None:
        recipe = for_checkpoint(Recipe(method=chosen_method("auto")), checkpoint)
        output.note(
            _("quantizing {checkpoint} to {bits:g} bits; this is done once", checkpoint=checkpoint, bits=recipe.bits)
        )
    else:
        output.note(
            _(
                "storing {checkpoint} with its own {bits:g}-bit weights, once; a slowdown budget buys nothing here, "
                "for there are no residuals (`lowbit-chat quantize` rounds again and keeps some)",
                checkpoint=checkpoint,
                bits=kept.bits,
            )
        )
        recipe = kept
    info = quantized(checkpoint, recipe, services, output, name=name)
    if info.summary.warning:
        output.note(reported(info.summary.warning))
    return info


def _usual(info: StoredModelInfo) -> bool:
    """Whether a model is as `_make` makes it, or made it before a trellis was the default."""
    from models.recipe import KEPT_UNASKED, Recipe

    own = info.recipe
    return own in (Recipe(method="trellis"), Recipe()) or (own.kept and own.bits <= KEPT_UNASKED)


def _made_from(checkpoint: Path, services: Services) -> StoredModelInfo | None:
    """A stored model made from this very folder or file, as usual: with its own weights, or rounded."""
    from models.origins import Origins
    from models.store.store import source_name

    source = source_name(checkpoint)
    found = [info for info in services.store().list() if info.source == source]
    candidates = sorted(filter(_usual, found), key=lambda info: (not info.recipe.kept, not info.recipe.trellis))
    origins = Origins(services.store())
    return next((info for info in candidates if origins.made_from(info, checkpoint)), None)


def _made_of_known(model: KnownModel, services: Services, output: Output) -> StoredModelInfo:
    """A stored model made from a model with a short name, rounded as usual; made now if there is none."""
    from models.origins import recorded

    candidates = [info for info in services.store().list() if _usual(info) and not info.recipe.kept]
    ready = [info for info in candidates if model.sha256 in recorded(info).values()]
    if ready:
        return ready[0]
    check_needed(MAKING)
    return _make(fetched(model, services, output), services, output, name=model.name)
