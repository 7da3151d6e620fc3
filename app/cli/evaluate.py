"""`lowbit-chat eval`: perplexity over a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import options
from app.cli.errors import CliError
from app.cli.interrupt import Interrupt
from app.cli.load import LoadChoices, compensate, load_plan
from app.cli.model import find_checkpoint, open_model
from app.cli.output import Output
from app.cli.quantize import read_text
from app.cli.services import Services, services_of

if TYPE_CHECKING:
    from app.cli.load import LoadPlan
    from models.store import StoredModel
    from runtime.evaluate import EvalResult

_WINDOW = 1024
"""Longest window unless one is asked for."""


def evaluate(
    ctx: typer.Context,
    model: options.Model,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text in UTF-8.", show_default=False)],
    window: Annotated[
        int | None,
        typer.Option("--window", min=2, help="Tokens of a window; 1024, or the model's maximum.", show_default=False),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Tokens between windows; half a window.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="Cut the text after so many.", show_default=False)
    ] = None,
    k_chunk: options.KChunk = None,
    budget: options.Budget = None,
    select: Annotated[
        options.Select | None,
        typer.Option("--select", help="How salient channels are chosen; approx, as in decoding.", show_default=False),
    ] = None,
    kv: options.KVOption = None,
    full_precision: Annotated[
        bool, typer.Option("--full-precision", help="Evaluate the checkpoint itself, before quantization.")
    ] = False,
    backend: options.BackendOption = None,
    as_json: options.Json = False,
) -> None:
    """Measure perplexity over a text, in sliding windows."""
    if window is not None and stride is not None and stride > window:
        raise typer.BadParameter("the stride can't exceed the window", param_hint="--stride")
    options.one_of(budget, k_chunk)
    if full_precision and any(choice is not None for choice in (k_chunk, budget, select, kv, backend)):
        raise typer.BadParameter("--full-precision has no --k-chunk, --budget, --select, --kv or --backend")
    output, services = Output(as_json=as_json), services_of(ctx)
    content = read_text(text)
    span = _Span(window=window, stride=stride, max_tokens=max_tokens)
    if full_precision:
        result, about = _full_precision(model, content, span, services, output)
    else:
        choices = LoadChoices(kv=kv, k_chunk=k_chunk, budget=budget, backend=backend, select=select or "approx")
        result, about = _stored(model, content, span, choices, services, output)
    if as_json:
        output.result(
            {
                "perplexity": result.perplexity,
                "nll_sum": result.nll_sum,
                "tokens": result.tokens,
                **about,
                "recall": result.recall,
                "seconds": result.seconds,
            }
        )
        return
    recall = "" if result.recall is None else f", recall {100 * result.recall:.0f} %"
    output.text(f"perplexity {result.perplexity:.4f} over {result.tokens} tokens in {result.seconds:.1f} s{recall}")


class _Span:
    """Which tokens are scored in which windows."""

    def __init__(self, *, window: int | None, stride: int | None, max_tokens: int | None) -> None:
        self._window = window
        self._stride = stride
        self._max_tokens = max_tokens

    def window(self, maximum: int) -> int:
        """Tokens of a window, for a model with a context of `maximum`.

        Raises:
            CliError: the window asked for is longer than that.
        """
        if self._window is not None and self._window > maximum:
            raise CliError(f"a window of {self._window} tokens is longer than this model's context of {maximum}")
        return self._window if self._window is not None else min(_WINDOW, maximum)

    def stride(self, maximum: int) -> int:
        """Tokens between windows."""
        return self._stride if self._stride is not None else max(1, self.window(maximum) // 2)

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens to look at."""
        return tokens[: self._max_tokens]


def _stored(
    name: str, text: str, span: _Span, choices: LoadChoices, services: Services, output: Output
) -> tuple[EvalResult, dict[str, Any]]:
    """Perplexity of a stored model, and what the JSON object says about how it ran."""
    from runtime.evaluate import perplexity
    from runtime.operations.channels import k_chunk_by_type
    from runtime.tokenizer import Tokenizer

    model = open_model(name, services, output)
    maximum = model.spec.max_context
    window = span.window(maximum)
    plan = load_plan(model, replace(choices, context=window), services, output)
    load = replace(plan.options, k_chunk=_k_chunk(model, plan, services, output))
    load = replace(load, measure_recall=load.k_chunk != 0 and load.select == "approx")
    tokens = span.cut(Tokenizer(model.tokenizer_path).encode(text))
    decoder, _ = services.open_decoder(model, load, plan.backend)
    try:
        with Interrupt() as interrupt, output.progress() as progress:
            result = perplexity(decoder, tokens, window, span.stride(maximum), progress, interrupt.cancelled)
    finally:
        decoder.close()
    about = {"kv": load.kv, "bits": model.recipe.bits, "k_chunk": k_chunk_by_type(load.k_chunk), "select": load.select}
    return result, about


def _k_chunk(model: StoredModel, plan: LoadPlan, services: Services, output: Output) -> Mapping[str, int] | int:
    """The compensation to evaluate; a budget is tuned with a decoder of its own, that need not measure recall."""
    from runtime.tuning import obstacle

    if not plan.budget:
        return plan.options.k_chunk
    if (problem := obstacle(plan.runner, model, plan.options.context)) is not None:
        if plan.asked:
            output.note(f"{problem.what}; {problem.fix}")
        return 0
    decoder, _ = services.open_decoder(model, replace(plan.options, select="approx"), plan.backend)
    try:
        if not services.is_tuned(decoder, model, plan.budget):
            output.note(
                f"{model.name} is first tuned for a budget of {plan.budget:g} % on this device, once, which takes a "
                "while; --k-chunk N evaluates with N channels instead, --k-chunk 0 without compensation"
            )
        compensate(decoder, model, plan, services, output)
        chosen = decoder.options.k_chunk
    finally:
        decoder.close()
    return chosen if isinstance(chosen, int) or any(chosen.values()) else 0


def _full_precision(
    name: str, text: str, span: _Span, services: Services, output: Output
) -> tuple[EvalResult, dict[str, Any]]:
    """Perplexity of the checkpoint that MODEL names."""
    from models.checkpoint import Checkpoint
    from runtime.evaluate import full_precision_perplexity
    from runtime.tokenizer import Tokenizer

    folder = find_checkpoint(name, services, output)
    checkpoint = Checkpoint.open(folder)
    maximum = checkpoint.spec.max_context
    window, stride = span.window(maximum), span.stride(maximum)
    tokens = span.cut(Tokenizer(folder).encode(text))
    with Interrupt() as interrupt, output.progress() as progress:
        result = full_precision_perplexity(checkpoint, tokens, window, stride, progress, interrupt.cancelled)
    bits = 8 * checkpoint.embedding().element_size()
    return result, {"kv": None, "bits": bits, "k_chunk": None, "select": None}
