"""`lowbit-chat list`, `show`, `rm`, `pull`, `quantize` and `export`: checkpoints and stored models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.amounts import byte_count, perplexity
from app.cli import options
from app.cli.model import fetched, find_checkpoint, is_stored, pulled, quantized, unknown
from app.cli.output import NAME, CliError, Interrupt, Output, at_a_terminal
from app.cli.serve import loaded_model, result_of, unload
from app.cli.services import DEMO, Services, services_of
from app.language import _, ngettext, number
from app.reports import reported
from models.catalogue import KNOWN, source_of
from models.errors import MAKING, check_needed
from models.export import ExportFormat
from models.recipe import (
    DEFAULT_GROUP_SIZE,
    EXPECTED_K_CHUNK,
    GOOD_FOR,
    KEEPS,
    KEPT,
    QOQ_GROUP_SIZE,
    AskedMethod,
    chosen_method,
)
from runtime.wire.answers import BASE

if TYPE_CHECKING:
    from models.store import StoredModelInfo
    from models.store.certificate import Way
    from models.store.manifest import Summary


_VERIFY = "verify"
METHODS_HELP = ", ".join(f"{method} ({words})" for method, words in (*GOOD_FOR.items(), (KEPT, KEEPS)))
"""The quantization methods and their uses."""
_LABELS = {
    "base": _(BASE),
    "gpu_bytes": _("device memory"),
    "disk_bytes": _("disk space"),
    "active_bytes": _("read per token"),
    "residual_bytes": _("residuals"),
    "name": _("name"),
    "bits": _("bits"),
    "bits_per_weight": _("bits per weight"),
    "parameters": _("parameters"),
    "family": _("family"),
    "context": _("context"),
    "bundled": _("bundled"),
    "perplexity_before": _("perplexity before"),
    "perplexity_after": _("perplexity after"),
    "warning": _("warning"),
    "source": _("source"),
    "source_types": _("source types"),
    "path": _("path"),
    "method": _("method"),
    "block_bits": _("block bits"),
    "group_size": _("group size"),
    "residual_bits": _("residual bits"),
    "head_bits": _("head bits"),
    "smooth_attention": _("smooth attention"),
    "steps": _("steps"),
    "verified": _("verified"),
    "certificate": _("certificate"),
    "cache": _("cache"),
}
"""What `show` calls its fields, for people."""


def list_models(
    ctx: typer.Context,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="List GGUF files of Ollama, LM Studio, llama.cpp and the hub's cache."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the stored models with their device memory, residuals in main memory, and disk space."""
    output, services = Output(as_json=as_json), services_of(ctx)
    if elsewhere:
        _list_elsewhere(output, as_json=as_json)
        return
    entries, damaged = _all(services)
    if as_json:
        output.result(
            {
                "models": [_entry(info, bundled=bundled) for info, bundled in entries],
                "damaged": [{"name": name, "reason": reason} for name, reason in damaged.items()],
            }
        )
        return
    names = _("NAME"), _("BITS"), _("SIZE"), _("RESIDUALS"), _("DISK"), _("PARAMETERS"), _("CONTEXT"), _("PERPLEXITY")
    rows = [names]
    for info, bundled in entries:
        summary = info.summary
        rows.append(
            (
                _("{name} (bundled)", name=info.name) if bundled else info.name,
                number(summary.bits_per_weight, ".2f"),
                _size(summary),
                byte_count(summary.residual_bytes),
                byte_count(summary.disk_bytes),
                _count(summary.parameters),
                str(summary.context),
                perplexity(summary.perplexity_before, summary.perplexity_after) or "-",
            )
        )
    output.table(rows, spare=(_("PARAMETERS"), _("CONTEXT"), _("RESIDUALS")))
    for name, reason in damaged.items():
        output.note(_("{name} is damaged: {reason}", name=name, reason=reported(reason)))


def _list_elsewhere(output: Output, *, as_json: bool) -> None:
    from models.elsewhere import found

    files = found()
    if as_json:
        output.result({"files": [{"name": one.name, "bytes": one.size, "path": str(one.path)} for one in files]})
        return
    output.table([(_("NAME"), _("SIZE")), *((one.name, byte_count(one.size)) for one in files)])
    output.note(
        _("`lowbit-chat run NAME` makes a low-bit model of one; nothing is copied") if files else _("there are none")
    )


def show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_model, show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare checksums.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Show what a step of tokens passes, node by node.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show details of a stored model."""
    from app.settings import load
    from models.store.certificate import Certificate
    from runtime.kv.kinds import usual_cache

    output, services = Output(as_json=as_json), services_of(ctx)
    info = _info(name, services)
    if graph:
        from models.architecture import step_graph
        from models.store import StoredModel

        lines = str(step_graph(StoredModel.open_folder(info.path, info.name).spec)).splitlines()
        output.result({"name": info.name, "graph": lines}) if as_json else output.text("\n".join(lines))
        return
    if verify:
        _verify(info, output)
    certificate, own = Certificate.read(info.path), Certificate.of(info.path)
    entry = {**_entry(info, bundled=name == DEMO), **_details(info), "verified": verify}
    entry["certificate"] = None if certificate is None else asdict(certificate)
    entry["cache"] = usual_cache(own.kv)
    if as_json:
        output.result(entry)
        return
    entry["perplexity_after"] = perplexity(info.summary.perplexity_before, info.summary.perplexity_after) or None
    entry["certificate"] = "\n".join(map(reported, own.words.splitlines()))
    if (asked := load().kv) is not None and asked != entry["cache"]:
        entry["cache"] = _("{usual} by default, {asked} by your settings", usual=entry["cache"], asked=asked)
        if own.harms(asked):
            entry["cache"] = _("{cache}, which damages answers", cache=entry["cache"])
    output.fields([(_LABELS[key], _shown(key, value)) for key, value in entry.items() if value is not None], 20)


def verify(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_stored, show_default=False)],
    backend: options.BackendOption = None,
    as_json: options.Json = False,
) -> None:
    """Repeat a model's certificate: compare its files' checksums, and measure again what it loses of its source."""
    from models.store import StoredModel
    from models.store.certificate import FILE, KEPT_WORDS, TOLERANCES, Certificate
    from models.store.manifest import content_of
    from runtime.backends import AUTO
    from runtime.load.certificate import Reference, cache_losses, measured

    output, services = Output(as_json=as_json), services_of(ctx)
    begin, info = time.perf_counter(), _info(name, services)
    _verify(info, output)
    certificate = Certificate.read(info.path)
    model = StoredModel.open_folder(info.path, info.name)
    reference = Reference.of(model)
    if certificate is None or (reference is None and certificate.ways):
        raise CliError(
            _(
                "the files of {name} are whole, but it has no certificate: an older version made it, or it could not "
                "be measured; `quantize --force` makes it again",
                name=name,
            )
        )
    if certificate.model != content_of(info.path):
        raise CliError(
            _(
                "{file} belongs to other files than these: one of them was replaced, together with the manifest; "
                "quantize the model again (`quantize --force`)",
                file=info.path / FILE,
            )
        )
    with Interrupt() as interrupt, output.progress() as progress:
        how: dict[str, Any] = {"backend": backend or AUTO, "progress": progress, "cancelled": interrupt.cancelled}
        found = () if reference is None else measured(model, reference, certificate.ways, **how)
        again = cache_losses(model, services.evaluation_text(), **how) if certificate.caches else ()
    wrong = list[str]()

    def both(was: Way, way: Way) -> list[str]:
        return [number(getattr(one, field), ".4g") for field in TOLERANCES for one in (was, way)]

    def repeated(before: Sequence[Way], now: Sequence[Way]) -> list[dict[str, Any]]:
        pairs = zip(before, now, strict=False)
        return [asdict(was) | {"again": {field: getattr(way, field) for field in TOLERANCES}} for was, way in pairs]

    if certificate.kept and not as_json:
        output.text(reported(KEPT_WORDS))
    rows: list[tuple[str, ...]] = [("", "KL", _("again"), _("same, %"), _("again"), _("perplexity"), _("again"))]
    for was, way in zip(certificate.ways, found, strict=True):
        rows.append((_("{what}, {kv} cache", what=was.name, kv=was.kv), *both(was, way)))
        wrong += [f"{rows[-1][0]}: {what}" for what in was.apart(way)]
    for was, way in zip(certificate.caches, again, strict=False):  # other answers are drawn elsewhere
        rows.append((_("answers, {kv} cache", kv=was.kv), *both(was, way)))
    if (default := Certificate(caches=again).kv) != certificate.kv:
        wrong.append(_("the default cache is {now}, was {before}", now=default, before=certificate.kv))
    if as_json:
        about = {"name": name, "ok": not wrong, "model": certificate.model, "tokens": certificate.tokens}
        about |= {"ways": repeated(certificate.ways, found), "caches": repeated(certificate.caches, again)}
        output.result({**about, "apart": wrong, "seconds": time.perf_counter() - begin})
    else:
        output.table(rows)
    if wrong:
        raise CliError(
            _(
                "{name} is not as its certificate says ({differences}): its files are whole, so look at this machine "
                "or its backend (`doctor`, or `verify --backend reference`), and report it",
                name=name,
                differences="; ".join(wrong),
            )
        )


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
    from runtime.engine.saved import forget, forgetting

    output, services = Output(as_json=as_json), services_of(ctx)
    if chats == (name is not None):
        raise typer.BadParameter(_("give the name of a model, or --chats"), param_hint="NAME")
    if name is None:
        gone = forget(services.chats())
        if as_json:
            output.result({"removed_files": gone.files, "removed_bytes": gone.bytes})
        else:
            output.text(
                ngettext(
                    "removed {count} saved cache of a conversation, {size}",
                    "removed {count} saved caches of conversations, {size}",
                    gone.files,
                    size=byte_count(gone.bytes),
                )
            )
        return
    if name == DEMO:
        raise CliError(_("the bundled model can't be removed: it is part of the program"))
    store = services.store()
    if not is_stored(name, services):
        raise CliError(unknown(name, services))
    if result_of(loaded_model(services)) == name:
        if not force:
            raise CliError(
                _("{name} is loaded in the runtime: load another model there first, or repeat with --force", name=name)
            )
        result_of(unload(services))
    if not (force or as_json) and at_a_terminal() and not _agreed(store.info(name)):
        output.note(_("{name} is kept", name=name))
        return
    with forgetting(services.chats(), store.root):
        store.remove(name)
    if as_json:
        output.result({"removed": name})
    else:
        output.text(_("removed {name}", name=name))


def _agreed(info: StoredModelInfo) -> bool:
    """Ask the user at the terminal to confirm deleting a model."""
    question = _(
        "delete {name}, {size}? The saved caches of its chats will be deleted too",
        name=info.name,
        size=byte_count(info.summary.disk_bytes),
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
        told = _("verifying {name}", name=info.name)

        def watch(done: int, total: int) -> None:
            interrupt.raise_if_pressed()
            progress(Progress(phase=_VERIFY, done=done, total=total, unit="bytes", message=told))

        verify(info.path, Manifest.read(info.path), watch)


def _size(summary: Summary) -> str:
    """Size of the weights, and of those that a token reads where these are fewer."""
    size = byte_count(summary.gpu_bytes)
    if summary.active_bytes is None:
        return size
    return _("{size} ({read} a token)", size=size, read=byte_count(summary.active_bytes))


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


def _shown(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if key == "source_types":
        return _types(value)
    if key == "parameters":
        return _count(value)
    if key == "warning":
        return reported(value)
    return (
        byte_count(value)
        if key.endswith("_bytes")
        else number(value, ".4g")
        if isinstance(value, float)
        else str(value)
    )


def _details(info: StoredModelInfo) -> dict[str, Any]:
    from models.recipe import QOQ_STEPS
    from runtime.load.catalogue import template_in

    recipe = info.recipe
    return {
        "base": not template_in(info.path),
        "source": info.source,
        "source_types": info.source_types,
        "path": str(info.path),
        "method": recipe.method,
        "block_bits": None if recipe.block_bits is None else list(recipe.block_bits),
        "group_size": recipe.group_size,
        "residual_bits": recipe.residual_bits,
        "head_bits": recipe.layer_bits("head"),
        "smooth_attention": recipe.smooth_attention,
        "steps": [step for step in QOQ_STEPS if getattr(recipe, step)] if recipe.per_token else None,
    }


def _types(weights: Mapping[str, int]) -> str:
    """Data types of a checkpoint's weights: `Q4_1 79 %, Q8_0 21 % (low-bit already)`."""
    from models.gguf.header import WHOLE_TYPES

    total = sum(weights.values())
    shares = ", ".join(f"{kind} {100 * count / total:.0f} %" for kind, count in weights.items())
    return shares if all(kind in WHOLE_TYPES for kind in weights) else _("{shares} (low-bit already)", shares=shares)


def _count(parameters: int) -> str:
    """A number of parameters: `1.1 B`, `260 K`."""
    for letter, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= scale:
            return f"{number(parameters / scale, '.1f')} {letter}"
    return str(parameters)


def pull(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A short name, such as qwen3-0.6b, or one on the hub: owner/name or owner/name:TYPE.",
            show_default=False,
        ),
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Download a checkpoint into the Hugging Face cache; an interrupted download resumes."""
    output, services = Output(as_json=as_json), services_of(ctx)
    begin, name = time.perf_counter(), source_of(name)
    if name in KNOWN:
        if revision is not None:
            raise typer.BadParameter(_("{name} is a single file without revisions", name=name), param_hint="--revision")
        path = fetched(KNOWN[name], services, output)
    else:
        path = pulled(name, revision, services, output)
    if as_json:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        output.result(
            {
                "name": name,
                "revision": KNOWN[name].hub.commit if name in KNOWN else (path if path.is_dir() else path.parent).name,
                "path": str(path),
                "bytes": sum(file.stat().st_size for file in files),
                "seconds": time.perf_counter() - begin,
            }
        )
    else:
        output.text(str(path))


class Step(StrEnum):
    ROTATE = "rotate"
    REORDER = "reorder"
    SMOOTH_ATTENTION = "smooth-attention"
    SMOOTH_OUTPUTS = "smooth-outputs"
    CLIP = "clip"


def quantize(
    ctx: typer.Context,
    model: options.Model,
    bits: Annotated[
        float,
        typer.Option(
            "--bits",
            metavar="2|3|3.5|4",
            help="Bits per weight: 3, 4, or an average in between; the blocks that need it most get 4. 2, clearly "
            "worse, by a trellis.",
        ),
    ] = 4,
    method: Annotated[AskedMethod, typer.Option("--method", help=f"Base quantizer: {METHODS_HELP}.")] = "auto",
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help=f"Input channels per scale, a multiple of 32; default: {DEFAULT_GROUP_SIZE}, and {QOQ_GROUP_SIZE} for "
            "qoq, where 0 means one scale per output channel.",
            show_default=False,
        ),
    ] = None,
    residual_bits: Annotated[
        int | None,
        typer.Option(
            "--residual-bits",
            help="Bits of the residuals in RAM: 0, 2, 4, 8 or 16; default: 4, and 0 for qoq.",
            show_default=False,
        ),
    ] = None,
    expect_k_chunk: Annotated[
        int,
        typer.Option(
            "--expect-k-chunk",
            help="The most salient channels per 1024 that compensation is expected to restore: gptq, awq and awq-gptq "
            "are made to be good with none, a quarter and all of them restored, and all residuals are scaled for "
            "these. 0 for use without compensation.",
        ),
    ] = EXPECTED_K_CHUNK,
    smooth_attention: Annotated[
        bool | None,
        typer.Option(
            "--smooth-attention/--no-smooth-attention",
            help="Equalize the channels of keys, for caches of 4 bits or fewer (--kv int4). On by default for qoq.",
            show_default=False,
        ),
    ] = None,
    without: Annotated[
        list[Step] | None,
        typer.Option("--without", help="A step of qoq to leave out; may be given several times.", show_default=False),
    ] = None,
    also: Annotated[
        list[Step] | None,
        typer.Option(
            "--with",
            help="An optional step of qoq: rotate.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Text to calibrate on; default: a bundled one."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the new model.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model of that name.")] = False,
    as_json: options.Json = False,
) -> None:
    """Make a low-bit model; an interrupted run resumes after its last finished block."""
    from models.errors import QuantizationError
    from models.quantize import for_checkpoint
    from models.recipe import Recipe

    try:
        for option, steps in (("--without", without), ("--with", also)):
            if steps and method != "qoq":
                raise QuantizationError(
                    _("{option} is for the method qoq, not for {method}", option=option, method=method)
                )
        if both := sorted(set(without or ()) & set(also or ())):
            raise QuantizationError(
                _("{step} is both asked for (--with) and left out (--without); drop one", step=both[0])
            )
        asked = {"group_size": group_size, "residual_bits": residual_bits, "smooth_attention": smooth_attention}
        asked |= {step.replace("-", "_"): False for step in without or ()}
        asked |= {step.replace("-", "_"): True for step in also or ()}
        given = {key: value for key, value in asked.items() if value is not None}
        recipe = None
        if method == KEPT:
            source = ctx.get_parameter_source("bits")
            if given or (source is not None and source.name != "DEFAULT"):
                raise QuantizationError(
                    _("{method} takes bits and groups as the file has them; leave other options out", method=KEPT)
                )
        else:
            own = chosen_method(method, group_size)
            recipe = Recipe.usual(own, bits=bits, expected_k_chunk=expect_k_chunk, **given)
    except QuantizationError as error:
        raise typer.BadParameter(reported(str(error))) from error
    if name == DEMO:
        raise typer.BadParameter(
            _("{name} is the name of the bundled model: choose another", name=DEMO), param_hint="--name"
        )
    check_needed(MAKING)  # before anything is downloaded
    output, services = Output(as_json=as_json), services_of(ctx)
    text = None if calibration is None else read_text(calibration)
    begin = time.perf_counter()
    checkpoint = find_checkpoint(model, services, output)
    recipe = for_checkpoint(recipe, checkpoint, method)
    info = quantized(checkpoint, recipe, services, output, name=name, calibration=text, force=force)
    summary = info.summary
    if summary.warning:
        output.note(reported(summary.warning))
    if as_json:
        output.result(
            {
                "name": info.name,
                "bits_per_weight": summary.bits_per_weight,
                "gpu_bytes": summary.gpu_bytes,
                "cpu_residual_bytes": summary.residual_bytes,
                "perplexity_before": summary.perplexity_before,
                "perplexity_after": summary.perplexity_after,
                "seconds": time.perf_counter() - begin,
            }
        )
        return
    beside = (
        _("weights of the file, no residuals")
        if recipe.kept
        else _("residuals {size}", size=byte_count(summary.residual_bytes))
    )
    output.text(
        _(
            "{name}: {bits:.2f} bits per weight, {size}, {beside}",
            name=info.name,
            bits=summary.bits_per_weight,
            size=byte_count(summary.gpu_bytes),
            beside=beside,
        )
    )
    if summary.perplexity_before is not None and summary.perplexity_after is not None:
        before, after = summary.perplexity_before, summary.perplexity_after
        output.text(
            _(
                "perplexity as a chat gets it: {before:.2f} before, {after} after",
                before=before,
                after=perplexity(before, after),
            )
        )


def read_text(file: Path) -> str:
    """Read a UTF-8 text file, preserving line ends.

    Raises:
        CliError: it cannot be read, or is not UTF-8 text.
    """
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise CliError(_("cannot read {file}: {error}", file=file, error=reported(error.strerror or ""))) from error
    except UnicodeDecodeError as error:
        raise CliError(_("{file} is not UTF-8 text (byte {at} is not)", file=file, at=error.start)) from error


def export(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_model, show_default=False)],
    kind: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="gguf: a file for llama.cpp, 4-bit groups as Q4_1. awq, gptq, compressed-tensors: a folder for vLLM "
            "or SGLang, blocks in 4-bit groups, embedding and head in 16 bits.",
            show_default=False,
        ),
    ],
    path: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="PATH", help="The file or folder to make; default: NAME.gguf or NAME-FORMAT, here."
        ),
    ] = None,
    residuals: Annotated[
        bool,
        typer.Option(
            "--residuals",
            help="Add all residuals to the weights first, and round the sums anew: to 8 bits in gguf, to 4 in the "
            "others.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write a stored model in the format of llama.cpp, vLLM or SGLang. The stored model stays as it is."""
    from models.export.export import default_target
    from models.export.export import export as write

    output, services = Output(as_json=as_json), services_of(ctx)
    if name != DEMO and not is_stored(name, services):
        raise CliError(unknown(name, services))
    model = services.demo() if name == DEMO else services.store().open(name)
    begin = time.perf_counter()
    target = path or default_target(name, kind)
    with Interrupt() as interrupt, output.progress() as progress:
        made = write(model, target, kind, residuals=residuals, progress=progress, cancelled=interrupt.cancelled)
    for note in made.notes:
        output.note(reported(note))
    if as_json:
        output.result(
            {
                "name": name,
                "format": kind,
                "path": str(made.path),
                "bytes": made.bytes,
                "weights": made.weights,
                "notes": list(made.notes),
                "seconds": time.perf_counter() - begin,
            }
        )
        return
    total = sum(made.weights.values())
    shares = ", ".join(f"{type_} {100 * count / total:.0f} %" for type_, count in made.weights.items())
    output.text(_("{path}: {size}, weights in {shares}", path=made.path, size=byte_count(made.bytes), shares=shares))
