"""Loading a model for a command: settings, memory plan, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from app.cli.output import Output
from app.cli.services import Services

if TYPE_CHECKING:
    from models.store import StoredModel
    from runtime.decoder import DecoderOptions, KVKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoices:
    """What the person asked for; None leaves it to the settings and the program."""

    kv: str | None = None
    """Precision of the cache."""
    context: int | None = None
    """Tokens of context."""
    k_chunk: int | None = None
    """Salient channels per 1024 of every layer."""
    backend: str | None = None
    """What runs the model."""
    select: Literal["approx", "exact", "static", "random"] = "approx"
    """How salient channels are chosen."""


def load_options(
    model: StoredModel, choices: LoadChoices, services: Services, output: Output
) -> tuple[DecoderOptions, str]:
    """How to load a model here, after the settings and the memory plan.

    Args:
        model: The stored model.
        choices: What was asked for.
        services: The machine and its memory.
        output: For what the person should know.

    Returns:
        The options, and the backend's name or `auto`.

    Raises:
        SettingsError: a setting is not acceptable.
        RuntimeFailure: the choices do not go together, or memory does not suffice.
    """
    from app.settings import load
    from runtime.decoder import DecoderOptions
    from runtime.kernels.select.budget import default_k_chunk
    from runtime.memory import DEFAULT_CONTEXT, ModelSizes, plan
    from runtime.open import preparation

    settings = load({"kv": choices.kv, "k_chunk": choices.k_chunk, "backend": choices.backend})
    k_chunk = default_k_chunk(model.recipe.residual_bits) if settings.k_chunk is None else settings.k_chunk
    kv = cast("KVKind", settings.kv)
    summary = model.info.summary
    planned = plan(
        model.spec,
        ModelSizes(weight_bytes=summary.gpu_bytes, residual_bytes=summary.residual_bytes),
        kv=kv,
        context=_context(choices.context, settings.context, model.spec.max_context),
        backend="reference" if settings.backend == "reference" else "cpu",
        compensated=k_chunk > 0,
        memory=services.memory(),
    )
    if choices.context is None and planned.context < min(model.spec.max_context, settings.context or DEFAULT_CONTEXT):
        output.note(f"the context is {planned.context} tokens: no more fits what memory is free")
    options = DecoderOptions(
        kv=kv,
        context=planned.context,
        k_chunk=k_chunk,
        select=choices.select,
    )
    if first := preparation(settings.backend):
        output.note(first)
    return options, settings.backend


def k_chunk_by_type(k_chunk: Mapping[str, int] | int) -> dict[str, int]:
    """k_chunk of every type of layer, as `--json` writes it."""
    from runtime.kernels.select.budget import LAYER_KINDS, k_chunk_of

    return {kind: k_chunk_of(k_chunk, kind) for kind in LAYER_KINDS}


def _context(asked: int | None, setting: int | None, maximum: int) -> int | None:
    """A context on the command line is kept or refused; one in the settings gives way to a model that has less."""
    if asked is not None:
        return asked
    return None if setting is None else min(setting, maximum)
