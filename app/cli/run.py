"""`lowbit-chat run`: one answer, or a conversation on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import options
from app.cli.interrupt import Interrupt
from app.cli.load import LoadChoices, load_plan, speculate, spend_budgets, spend_on_prompts
from app.cli.model import open_model
from app.cli.output import Output
from app.cli.services import services_of

if TYPE_CHECKING:
    from app.cli.attachments import Attachments
    from app.cli.tools import RunTools
    from app.conversation import Passage
    from models.store import StoredModel
    from runtime.engine.engine import Engine
    from runtime.engine.generation import Usage
    from runtime.text.sampling import SamplingOptions

_PATIENCE_S = 3.0
"""Seconds of silence on standard input after which the user is told that the program is waiting for it."""


def run(
    ctx: typer.Context,
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt. Standard input is appended to it; without both, a conversation begins on a terminal.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System prompt.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", callback=options.set_within, help="Longest answer.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", callback=options.set_within, help="Sampling temperature; 0 is greedy.", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            callback=options.set_within,
            help="Cumulative probability of the tokens sampled from; 1 is off.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", callback=options.set_within, help="Number of tokens sampled from; 0 is all.", show_default=False
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            callback=options.set_within,
            help="Minimum probability relative to the best token; 0 is off.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Random seed; the same seed gives the same answer.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Text that ends the answer; may be repeated.", show_default=False),
    ] = None,
    attach: Annotated[
        list[Path] | None,
        typer.Option(
            "--attach",
            metavar="PATH",
            exists=True,
            help="A document to answer from: text, code, PDF, HTML or Word. A folder, or a document longer than half "
            "of the context, is searched; may be repeated.",
            show_default=False,
        ),
    ] = None,
    mcp: Annotated[
        Path | None,
        typer.Option(
            "--mcp",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A file with mcpServers, whose tools the model may call. You are asked before each call.",
            show_default=False,
        ),
    ] = None,
    yes_tools: Annotated[
        list[str] | None,
        typer.Option(
            "--yes-tools", metavar="NAME", help="A tool that runs without asking; may be repeated.", show_default=False
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    k_chunk: options.KChunk = None,
    budget: options.Budget = None,
    prompt_budget: options.PromptBudget = None,
    kv: options.KVOption = None,
    speculation: options.Speculation = None,
    gamma: options.Gamma = None,
    context: options.Context = None,
    backend: options.BackendOption = None,
    as_json: options.Json = False,
) -> None:
    """Answer a prompt, or talk on a terminal."""
    if raw and system is not None:
        raise typer.BadParameter("--raw continues plain text, which has no system prompt: leave out --system")
    if raw and (attach or mcp):
        raise typer.BadParameter("--raw continues plain text: leave out --attach and --mcp")
    if yes_tools and mcp is None:
        raise typer.BadParameter("it only applies with --mcp", param_hint="--yes-tools")
    compensation = options.compensation(budget, k_chunk)
    options.check_speculation(speculation, gamma, kv)
    output, services = Output(as_json=as_json), services_of(ctx)
    text = _prompt(prompt, output)
    if not text and (as_json or not _on_terminal()):
        raise typer.BadParameter("nothing to answer: give a PROMPT, or text on standard input", param_hint="PROMPT")

    from app.cli.attachments import Attachments
    from app.cli.tools import RunTools
    from app.settings import load
    from runtime.text.reasoning import switch
    from runtime.text.sampling import SamplingOptions

    settings = load(
        {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "system_prompt": system,
        }
    )
    stored = open_model(model, services, output)
    drawn: dict[str, Any] = settings.sampling(stored.sampling)
    variables = switch(settings.thinking)
    sampling = SamplingOptions(max_tokens=settings.max_tokens, seed=seed, stop=tuple(stop or ()), **drawn)
    choices = LoadChoices(
        kv=kv,
        context=context,
        compensation=compensation,
        prompt_budget=prompt_budget,
        speculate=speculation,
        gamma=gamma,
        backend=backend,
    )
    plan = load_plan(stored, choices, services, output)
    with output.progress() as progress:
        engine = services.open_engine(plan, progress)
    with (
        contextlib.closing(engine),
        contextlib.closing(RunTools(mcp, yes_tools or (), output)) as tools,
        contextlib.closing(Attachments(engine, output)) as attachments,
    ):
        for path in attach or ():
            attachments.add(path)
        # An answer that is asked to repeat waits for all of the tuning, so as to be the same again.
        later = bool(text) and seed is None and temperature != 0
        spent = spend_budgets(engine.borrow, plan, choices, services, output, prompts_later=later)
        speculate(engine, spent.speculation, services)
        if text:
            system = None if raw else settings.system_prompt
            _answer(engine, stored, output, text, sampling, system, attachments, tools, variables)
            spend_on_prompts(engine, plan, spent, services, output)
        else:
            from app.cli.repl import Repl, line_history

            with line_history(services.home() / "lines"):
                Repl(engine, sampling, attachments, tools, variables, system=settings.system_prompt, raw=raw).loop()


def _answer(
    engine: Engine,
    model: StoredModel,
    output: Output,
    text: str,
    sampling: SamplingOptions,
    system: str | None,
    attachments: Attachments,
    tools: RunTools,
    variables: Mapping[str, bool | str] | None,
) -> None:
    """Print one answer, or its JSON object. Without even an empty system prompt, the text is continued as it is."""
    from app.cli.tools import continued, converse
    from runtime.wire.codec import to_json

    passages: Sequence[Passage] | None = None
    show = (lambda _: None) if output.as_json else output.stream
    with Interrupt() as interrupt:
        if system is None:
            found = continued(engine, text, sampling, interrupt.cancelled, show)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            told, passages = attachments.prompt(text)
            asked = [*messages, {"role": "user", "content": told}]
            found = converse(engine, asked, sampling, interrupt.cancelled, show, tools, variables)
    said, piece = found.text, found.last
    if not output.as_json and not said.endswith("\n"):
        output.stream("\n")
    interrupt.raise_if_pressed()
    assert piece.finish_reason is not None, "an answer ends with a reason"
    assert piece.usage is not None, "an answer ends with its counts"
    if output.as_json:
        cited = None if passages is None else [to_json(passage) for passage in passages]
        summary = _summary(engine, model, said, piece.finish_reason, piece.usage)
        output.result({**summary, "passages": cited, "tool_calls": list(found.calls)})
        return
    attachments.tell(passages)
    if piece.finish_reason == "length" and sampling.max_tokens is None:
        output.note(f"the answer was cut: the context of {engine.context} tokens is full")


def _summary(engine: Engine, model: StoredModel, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
    """The JSON object of an answer."""
    from runtime.compensation import k_chunk_by_type

    decoder = engine.decoder
    return {
        "text": text,
        "finish_reason": finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "ttft_s": usage.ttft_s,
        "decode_tokens_per_s": usage.decode_tokens_per_s,
        "model": model.name,
        "backend": decoder.backend,
        "bits": model.recipe.bits,
        "kv": decoder.options.kv,
        "k_chunk": k_chunk_by_type(decoder.options.k_chunk),
        "speculation": _speculation(usage),
    }


def _speculation(usage: Usage) -> dict[str, Any] | None:
    """Speculation statistics of an answer."""
    found = usage.speculation
    if found is None:
        return None
    return {
        "gamma": found.gamma,
        "acceptance_rate": found.acceptance_rate,
        "tokens_per_verify": found.tokens_per_verify,
    }


def _on_terminal() -> bool:
    return bool(sys.stdin) and sys.stdin.isatty() and sys.stdout.isatty()


def _prompt(argument: str | None, output: Output) -> str:
    """PROMPT and standard input, separated by an empty line; standard input is read unless it is a terminal."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty():
        waiting = threading.Timer(_PATIENCE_S, output.note, ["waiting for the end of standard input"])
        waiting.daemon = True
        waiting.start()
        try:
            piped = sys.stdin.read()
        finally:
            waiting.cancel()
    return "\n\n".join(part for part in (argument or "", piped.rstrip("\n")) if part.strip())
