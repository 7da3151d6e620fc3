"""`lowbit-chat eval`: perplexity of a text."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import options
from app.cli.errors import CliError
from app.cli.interrupt import Interrupt
from app.cli.load import LoadChoices, load_plan, spend_budgets
from app.cli.model import find_checkpoint, open_model
from app.cli.output import Output
from app.cli.quantize import read_text
from app.cli.services import Services, services_of
from models.needed import check_needed

if TYPE_CHECKING:
    from runtime.backends.decoder import DecoderOptions
    from runtime.load.plan import LoadPlan
    from runtime.measure.evaluate import EvalResult

_WINDOW = 1024
"""Default limit of the window's length."""


def evaluate(
    ctx: typer.Context,
    model: options.Model,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text in UTF-8.", show_default=False)],
    window: Annotated[
        int | None,
        typer.Option(
            "--window", min=2, help="Tokens per window; default: 1024, or the model's maximum.", show_default=False
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride", min=1, help="Tokens between the starts of windows; default: half a window.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=2, help="Use only this many tokens of the text.", show_default=False),
    ] = None,
    k_chunk: options.KChunk = None,
    budget: options.Budget = None,
    prompt_budget: options.PromptBudget = None,
    select: Annotated[
        options.Select | None,
        typer.Option(
            "--select", help="Selection of salient channels; default: approx, as in decoding.", show_default=False
        ),
    ] = None,
    kv: options.KVOption = None,
    full_precision: Annotated[
        bool, typer.Option("--full-precision", help="Evaluate the checkpoint itself, before quantization.")
    ] = False,
    backend: options.BackendOption = None,
    as_chat: Annotated[
        bool,
        typer.Option(
            "--as-chat", help="Prefill the first half of each window as a prompt, score the second half as decoded."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure the perplexity of a text, in sliding windows."""
    if window is not None and stride is not None and stride > window:
        raise typer.BadParameter("the stride can't exceed the window", param_hint="--stride")
    compensation = options.compensation(budget, k_chunk)
    if full_precision and any(choice is not None for choice in (compensation, prompt_budget, select, kv, backend)):
        raise typer.BadParameter(
            "--full-precision has no --k-chunk, --budget, --prompt-budget, --select, --kv or --backend"
        )
    output, services = Output(as_json=as_json), services_of(ctx)
    content = read_text(text)
    span = _Span(window=window, stride=stride, max_tokens=max_tokens, as_chat=as_chat)
    if full_precision:
        result, about = _full_precision(model, content, span, services, output)
    else:
        choices = LoadChoices(
            kv=kv,
            compensation=compensation,
            prompt_budget=prompt_budget,
            backend=backend,
            select=select or "approx",
        )
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
    """The windows and the scored tokens."""

    def __init__(self, *, window: int | None, stride: int | None, max_tokens: int | None, as_chat: bool) -> None:
        self._window = window
        self._stride = stride
        self._max_tokens = max_tokens
        self.as_chat = as_chat

    def window(self, maximum: int) -> int:
        """Tokens per window, for a model with a context of `maximum`.

        Raises:
            CliError: the requested window is longer than that.
        """
        if self._window is not None and self._window > maximum:
            raise CliError(f"a window of {self._window} tokens is longer than this model's context of {maximum}")
        return self._window if self._window is not None else min(_WINDOW, maximum)

    def stride(self, maximum: int) -> int:
        """Tokens between the starts of windows."""
        return self._stride if self._stride is not None else max(1, self.window(maximum) // 2)

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens to evaluate."""
        return tokens[: self._max_tokens]


def _stored(
    name: str, text: str, span: _Span, choices: LoadChoices, services: Services, output: Output
) -> tuple[EvalResult, dict[str, Any]]:
    """Perplexity of a stored model, with details for the JSON object."""
    from runtime.compensation import k_chunk_by_type
    from runtime.measure.evaluate import perplexity
    from runtime.text.tokenizer import Tokenizer

    model = open_model(name, services, output)
    maximum = model.spec.max_context
    window = span.window(maximum)
    choices = replace(choices, context=window)
    plan = load_plan(model, choices, services, output)
    load = _compensated(plan, span, choices, services, output)
    k_chunk, prompts = k_chunk_by_type(load.k_chunk), k_chunk_by_type(load.prompt_k_chunk)
    measure_recall = any(k_chunk.values()) and choices.select == "approx"
    tokens = span.cut(Tokenizer(model.tokenizer_path).encode(text))
    load = replace(load, measure_recall=measure_recall)
    with output.progress() as progress:
        decoder = replace(plan, options=load).open_decoder(progress)
    try:
        with Interrupt() as interrupt, output.progress() as progress:
            result = perplexity(
                decoder, tokens, window, span.stride(maximum), progress, interrupt.cancelled, as_chat=span.as_chat
            )
    finally:
        decoder.close()
    about = {"kv": load.kv, "bits": model.recipe.bits, "k_chunk": k_chunk, "select": load.select}
    return result, {**about, "prompt_k_chunk": prompts}


def _compensated(
    plan: LoadPlan, span: _Span, choices: LoadChoices, services: Services, output: Output
) -> DecoderOptions:
    """The options to evaluate; budgets are tuned on a separate decoder, which need not measure recall.

    The budget of prompts only matters if there are prompts.
    """
    from runtime.budget.tuning import obstacle

    model, budget = plan.model, plan.compensation.budget_percent
    prompts = plan.compensation.prompt_percent if span.as_chat else 0.0
    if not budget and not prompts:
        return plan.options
    if (problem := obstacle(plan.backend, model, plan.options.context)) is not None:
        if choices.compensation is not None:
            output.note(f"{problem.what}; {problem.fix}")
        return plan.options
    with output.progress() as progress:
        decoder = replace(plan, options=replace(plan.options, select="approx")).open_decoder(progress)
    try:
        if budget and not services.is_tuned(decoder, model, budget):
            output.note(
                f"{model.name} is first tuned for a budget of {budget:g} % on this device, once, which takes a "
                "while; --k-chunk N evaluates with N channels instead, --k-chunk 0 without compensation"
            )
        own = plan if prompts else replace(plan, compensation=replace(plan.compensation, prompt_budget_percent=0.0))
        spend_budgets(lambda *_: nullcontext(decoder), own, choices, services, output)
        tuned = decoder.options
        return replace(plan.options, k_chunk=tuned.k_chunk, n_tb=tuned.n_tb, prompt_k_chunk=tuned.prompt_k_chunk)
    finally:
        decoder.close()


def _full_precision(
    name: str, text: str, span: _Span, services: Services, output: Output
) -> tuple[EvalResult, dict[str, Any]]:
    """Perplexity of the checkpoint named by MODEL."""
    check_needed("measuring in full precision")
    from models.checkpoint import Checkpoint
    from runtime.measure.evaluate import full_precision_perplexity
    from runtime.text.tokenizer import Tokenizer

    folder = find_checkpoint(name, services, output)
    checkpoint = Checkpoint.open(folder)
    maximum = checkpoint.spec.max_context
    window, stride = span.window(maximum), span.stride(maximum)
    tokens = span.cut(Tokenizer(folder).encode(text))
    with Interrupt() as interrupt, output.progress() as progress:
        result = full_precision_perplexity(
            checkpoint, tokens, window, stride, progress, interrupt.cancelled, as_chat=span.as_chat
        )
    bits = 8 * checkpoint.embedding().element_size()
    return result, {"kv": None, "bits": bits, "k_chunk": None, "select": None, "prompt_k_chunk": None}
