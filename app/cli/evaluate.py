"""`lowbit-chat eval`: perplexity of a text."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import options
from app.cli.load import load_model, load_options, load_plan
from app.cli.model import find_checkpoint, open_model
from app.cli.models import read_text
from app.cli.output import CliError, Interrupt, Output
from app.cli.services import Services, services_of
from app.language import _
from models.errors import check_needed
from runtime.compensation import k_chunk_by_type

if TYPE_CHECKING:
    from models.store import StoredModel
    from runtime.engine.engine import Engine
    from runtime.load.plan import LoadOptions
    from runtime.measure.evaluate import EvalResult

_WINDOW = 1024
"""Default limit of the window's length."""


def evaluate(
    ctx: typer.Context,
    model: options.Model,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text file.", show_default=False)],
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
    budget: options.BudgetOrExact = None,
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
        raise typer.BadParameter(_("the stride can't exceed the window"), param_hint="--stride")
    compensation = options.compensation(budget, k_chunk, prompt_budget)
    if full_precision and any(choice is not None for choice in (compensation, prompt_budget, select, kv, backend)):
        raise typer.BadParameter(
            _("--full-precision has no --k-chunk, --budget, --prompt-budget, --select, --kv or --backend")
        )
    output, services = Output(as_json=as_json), services_of(ctx)
    content = read_text(text)
    span = _Span(window=window, stride=stride, max_tokens=max_tokens, as_chat=as_chat)
    if full_precision:
        result, about = _full_precision(model, content, span, services, output)
    else:
        stored = open_model(model, services, output)
        asked = load_options(
            stored,
            kv=kv,
            context=span.window(stored.spec.max_context),
            compensation=compensation,
            prompt_budget=prompt_budget if as_chat else 0.0,  # it only matters if there are prompts
            backend=backend,
            select=select or "approx",
        )
        budgets_asked = compensation is not None or prompt_budget is not None
        result, about = _stored(stored, content, span, asked, services, output, budgets_asked=budgets_asked)
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
    told = _(
        "perplexity {perplexity:.4f} over {count} tokens in {seconds:.1f} s",
        perplexity=result.perplexity,
        count=result.tokens,
        seconds=result.seconds,
    )
    if result.recall is not None:
        told += f", {_('recall {share:.0f} %', share=100 * result.recall)}"
    output.text(told)


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
            raise CliError(
                _(
                    "a window of {window} tokens is longer than this model's context of {most}",
                    window=self._window,
                    most=maximum,
                )
            )
        return self._window if self._window is not None else min(_WINDOW, maximum)

    def stride(self, maximum: int) -> int:
        """Tokens between the starts of windows."""
        return self._stride if self._stride is not None else max(1, self.window(maximum) // 2)

    def cut(self, tokens: list[int]) -> list[int]:
        return tokens[: self._max_tokens]


def _stored(
    model: StoredModel,
    text: str,
    span: _Span,
    asked: LoadOptions,
    services: Services,
    output: Output,
    *,
    budgets_asked: bool,
) -> tuple[EvalResult, dict[str, Any]]:
    """Perplexity of a stored model, with details for the JSON object."""
    from runtime.measure.evaluate import perplexity

    maximum = model.spec.max_context
    window = span.window(maximum)
    engine = _opened(model, asked, services, output, budgets_asked=budgets_asked)
    with contextlib.closing(engine), engine.borrow(window) as decoder:
        tokens = span.cut(engine.tokenizer.encode(text))
        with Interrupt() as interrupt, output.progress() as progress:
            result = perplexity(
                decoder, tokens, window, span.stride(maximum), progress, interrupt.cancelled, as_chat=span.as_chat
            )
        load = decoder.options
    k_chunk, prompts = k_chunk_by_type(load.k_chunk), k_chunk_by_type(load.prompt_k_chunk)
    about = {"kv": load.kv, "bits": model.recipe.bits, "k_chunk": k_chunk, "select": load.select}
    return result, {**about, "prompt_k_chunk": prompts}


def _opened(
    model: StoredModel, asked: LoadOptions, services: Services, output: Output, *, budgets_asked: bool
) -> Engine:
    """The model, compensated as asked. Budgets are tuned as `run` decodes: without other selections, and no recall."""
    plan, select = load_plan(model, asked, services), asked.select
    options = plan.options
    if asked.compensation.budget_percent or asked.compensation.prompt_percent:
        usual = replace(asked, select="approx")
        loaded = load_model(model, usual, services, output, budgets_asked=budgets_asked)
        tuned = loaded.engine.decoder.options
        loaded.engine.close()
        options = replace(options, k_chunk=tuned.k_chunk, n_tb=tuned.n_tb, prompt_k_chunk=tuned.prompt_k_chunk)
    measure_recall = any(k_chunk_by_type(options.k_chunk).values()) and select == "approx"
    with output.progress() as progress:
        plan.prepare(progress)
        return replace(plan, options=replace(options, measure_recall=measure_recall)).open_engine(progress)


def _full_precision(
    name: str, text: str, span: _Span, services: Services, output: Output
) -> tuple[EvalResult, dict[str, Any]]:
    """Perplexity of the checkpoint named by MODEL."""
    check_needed(_("measuring in full precision"))
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
