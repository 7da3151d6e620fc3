"""`lowbit-chat list`, `show` and `rm`: stored models and the bundled one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.amounts import byte_count
from app.cli import options
from app.cli.errors import CliError
from app.cli.interrupt import Interrupt
from app.cli.model import is_stored, unknown
from app.cli.output import NAME, Output, at_a_terminal
from app.cli.running import loaded_model, result_of, unload
from app.cli.services import DEMO, Services, services_of

if TYPE_CHECKING:
    from models.store import StoredModelInfo
    from models.store.manifest import Summary

_VERIFY = "verify"


def list_models(ctx: typer.Context, as_json: options.Json = False) -> None:
    """List the stored models with their device memory, residuals in main memory, and disk space."""
    output, services = Output(as_json=as_json), services_of(ctx)
    entries, damaged = _all(services)
    if as_json:
        output.result(
            {
                "models": [_entry(info, bundled=bundled) for info, bundled in entries],
                "damaged": [{"name": name, "reason": reason} for name, reason in damaged.items()],
            }
        )
        return
    rows = [("NAME", "BITS", "SIZE", "RESIDUALS", "DISK", "PARAMETERS", "CONTEXT", "PERPLEXITY")]
    for info, bundled in entries:
        summary = info.summary
        rows.append(
            (
                f"{info.name} (bundled)" if bundled else info.name,
                f"{summary.bits_per_weight:.2f}",
                _size(summary),
                byte_count(summary.residual_bytes),
                byte_count(summary.disk_bytes),
                _count(summary.parameters),
                str(summary.context),
                "-" if summary.perplexity_after is None else f"{summary.perplexity_after:.2f}",
            )
        )
    output.table(rows)
    for name, reason in damaged.items():
        output.note(f"{name} is damaged: {reason}")


def show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_model, show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare checksums.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show details of a stored model."""
    output, services = Output(as_json=as_json), services_of(ctx)
    info = _info(name, services)
    if verify:
        _verify(info, output)
    entry = {**_entry(info, bundled=name == DEMO), **_details(info), "verified": verify}
    if as_json:
        output.result(entry)
        return
    for key, value in entry.items():
        shown = "-" if value is None else byte_count(value) if key.endswith("_bytes") else value
        if key == "source_types" and value is not None:
            shown = _types(value)
        output.text(f"{key.replace('_', ' '):<20}{shown}")


def remove(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", autocompletion=options.complete_stored, show_default=False)
    ] = None,
    chats: Annotated[
        bool, typer.Option("--chats", help="Delete the saved caches of all conversations instead of a model.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Do not ask, and unload the model if the runtime has loaded it.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Delete a stored model and the saved caches of its conversations. Checkpoints in the Hugging Face cache stay.

    On a terminal it asks first. A model that is loaded is deleted only with --force.
    """
    from runtime.engine.conversations.saved_folder import forget, forgetting

    output, services = Output(as_json=as_json), services_of(ctx)
    if chats == (name is not None):
        raise typer.BadParameter("give the name of a model, or --chats", param_hint="NAME")
    if name is None:
        gone = forget(services.chats())
        if as_json:
            output.result({"removed_files": gone.files, "removed_bytes": gone.bytes})
        else:
            output.text(f"removed {gone.files} saved caches of conversations, {byte_count(gone.bytes)}")
        return
    if name == DEMO:
        raise CliError("the bundled model can't be removed: it is part of the program")
    store = services.store()
    if not is_stored(name, services):
        raise CliError(unknown(name, services))
    if result_of(loaded_model(services)) == name:
        if not force:
            raise CliError(f"{name} is loaded in the runtime: load another model there first, or repeat with --force")
        result_of(unload(services))
    if not (force or as_json) and at_a_terminal() and not _agreed(store.info(name)):
        output.note(f"{name} is kept")
        return
    with forgetting(services.chats(), store.root):
        store.remove(name)
    if as_json:
        output.result({"removed": name})
    else:
        output.text(f"removed {name}")


def _agreed(info: StoredModelInfo) -> bool:
    """Ask the user at the terminal to confirm deleting a model."""
    question = (
        f"delete {info.name}, {byte_count(info.summary.disk_bytes)}? The saved caches of its chats will be deleted too"
    )
    return typer.confirm(f"{NAME}: {question}", default=False, err=True)


def _all(services: Services) -> tuple[list[tuple[StoredModelInfo, bool]], dict[str, str]]:
    """All usable models, with whether they are bundled, and the errors of the others by name."""
    from models.errors import StoreError

    store = services.store()
    entries = [(info, False) for info in store.list()]
    damaged = {entry.folder: entry.reason for entry in store.damaged()}
    try:
        entries.insert(0, (services.demo_info(), True))
    except StoreError as error:
        damaged[DEMO] = str(error)
    return entries, damaged


def _info(name: str, services: Services) -> StoredModelInfo:
    if name == DEMO:
        return services.demo_info()
    if not is_stored(name, services):
        raise CliError(unknown(name, services))
    return services.store().info(name)


def _verify(info: StoredModelInfo, output: Output) -> None:
    """Compare the checksums of all files. Raises StoreError for damage, KeyboardInterrupt when stopped."""
    from models.progress import Progress
    from models.store.manifest import Manifest, verify

    with Interrupt() as interrupt, output.progress() as progress:

        def watch(done: int, total: int) -> None:
            interrupt.raise_if_pressed()
            progress(Progress(phase=_VERIFY, done=done, total=total, unit="bytes", message=f"verifying {info.name}"))

        verify(info.path, Manifest.read(info.path), watch)


def _size(summary: Summary) -> str:
    """Size of the weights, and of those that a token reads where these are fewer."""
    size = byte_count(summary.gpu_bytes)
    return size if summary.active_bytes is None else f"{size} ({byte_count(summary.active_bytes)} a token)"


def _entry(info: StoredModelInfo, *, bundled: bool) -> dict[str, Any]:
    summary = info.summary
    return {
        "name": info.name,
        "bits": info.recipe.bits,
        "bits_per_weight": summary.bits_per_weight,
        "disk_bytes": summary.disk_bytes,
        "gpu_bytes": summary.gpu_bytes,
        "active_bytes": summary.active_bytes,
        "residual_bytes": summary.residual_bytes,
        "parameters": summary.parameters,
        "family": summary.family,
        "context": summary.context,
        "bundled": bundled,
        "perplexity_before": summary.perplexity_before,
        "perplexity_after": summary.perplexity_after,
        "warning": summary.warning,
    }


def _details(info: StoredModelInfo) -> dict[str, Any]:
    from models.recipe import QOQ_STEPS

    recipe = info.recipe
    return {
        "source": info.source,
        "source_types": info.source_types,
        "path": str(info.path),
        "method": recipe.method,
        "block_bits": None if recipe.block_bits is None else list(recipe.block_bits),
        "group_size": recipe.group_size,
        "residual_bits": recipe.residual_bits,
        "head_bits": recipe.head_bits,
        "smooth_attention": recipe.smooth_attention,
        "steps": [step for step in QOQ_STEPS if getattr(recipe, step)] if recipe.per_token else None,
    }


def _types(weights: Mapping[str, int]) -> str:
    """Data types of a checkpoint's weights: `Q4_1 79 %, Q8_0 21 % (low-bit already)`."""
    from models.gguf.header import WHOLE_TYPES

    total = sum(weights.values())
    shares = ", ".join(f"{kind} {100 * count / total:.0f} %" for kind, count in weights.items())
    return shares if all(kind in WHOLE_TYPES for kind in weights) else f"{shares} (low-bit already)"


def _count(parameters: int) -> str:
    """A number of parameters: `1.1 B`, `260 K`."""
    for letter, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= scale:
            return f"{parameters / scale:.1f} {letter}"
    return str(parameters)
