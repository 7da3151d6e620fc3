"""`lowbit-chat run`: one answer, or a conversation on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli import options
from app.cli.load import load_model, load_options, tune_pending_prompts
from app.cli.model import open_model
from app.cli.output import CliError, Output, in_one_line
from app.cli.serve import result_of, running
from app.cli.services import DEMO, services_of
from app.conversation import Conversation
from app.language import _
from app.protocol import schema_format
from runtime.compensation import Compensation, Exact
from runtime.wire.answers import CONTINUES

if TYPE_CHECKING:
    from app.cli.services import Services
    from app.cli.talk import Talk
    from app.settings import Settings
    from models.store import StoredModel
    from runtime.load.loading import LoadedModel

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
        str | None,
        typer.Option(
            "--max-tokens", metavar="N", callback=options.set_within, help="Longest answer.", show_default=False
        ),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            "--temperature",
            metavar="T",
            callback=options.set_within,
            help="Sampling temperature; 0 is greedy; auto: what the model's maker recommends, as below.",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[
        str | None,
        typer.Option(
            "--top-p",
            metavar="P",
            callback=options.set_within,
            help="Cumulative probability of the tokens sampled from; 1 is off.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        str | None,
        typer.Option(
            "--top-k",
            metavar="N",
            callback=options.set_within,
            help="Number of tokens sampled from; 0 is all.",
            show_default=False,
        ),
    ] = None,
    min_p: Annotated[
        str | None,
        typer.Option(
            "--min-p",
            metavar="P",
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
    budget: options.BudgetOrExact = None,
    prompt_budget: options.PromptBudget = None,
    kv: options.KVOption = None,
    speculation: options.Speculation = None,
    gamma: options.Gamma = None,
    context: options.Context = None,
    backend: options.BackendOption = None,
    layers_on_device: options.LayersOnDevice = None,
    goes_on: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the last chat, and save what is said to it.")
    ] = False,
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A JSON schema that the answer fits.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template", metavar="NAME", help="A preset of the terminal UI as the system prompt.", show_default=False
        ),
    ] = None,
    form: Annotated[
        Literal["text", "json", "jsonl"],
        typer.Option("--output", help="json: as --json; jsonl: also an object for each piece of the answer."),
    ] = "text",
    plain: options.Plain = False,  # noqa: ARG001  its callback does the work
    as_json: options.Json = False,
) -> None:
    """Answer a prompt, or talk on a terminal."""
    if raw and system is not None:
        raise typer.BadParameter(_("--raw continues plain text, which has no system prompt: leave out --system"))
    if raw and (attach or mcp):
        raise typer.BadParameter(_("--raw continues plain text: leave out --attach and --mcp"))
    if yes_tools and mcp is None:
        raise typer.BadParameter(_("it only applies with --mcp"), param_hint="--yes-tools")
    if raw and goes_on:
        raise typer.BadParameter(_("--raw continues plain text, which is no chat: leave out --continue"))
    if template is not None:
        system = _preset(template, system, raw=raw)
    compensation = options.compensation(budget, k_chunk, prompt_budget)
    options.check_speculation(speculation, gamma, kv)
    output, services = Output(as_json=as_json or form == "json", lines=form == "jsonl"), services_of(ctx)
    response_format = None if schema is None else schema_format(_schema(schema))
    text = _prompt(prompt, output)
    if not text and (output.as_json or not _on_terminal()):
        raise typer.BadParameter(_("nothing to answer: give a PROMPT, or text on standard input"), param_hint="PROMPT")

    from app.settings import load

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
    options_of = partial(
        load_options,
        kv=kv,
        context=context,
        prompt_budget=prompt_budget,
        speculate=speculation,
        gamma=gamma,
        backend=backend,
        layers_on_device=layers_on_device,
    )
    asked = options_of(stored, compensation=compensation)
    own: dict[str, Any] = {"seed": seed, "stop": tuple(stop or ()) or None, "response_format": response_format}
    if system is not None:
        own["system_prompt"] = system
    repeats = seed is not None or settings.temperature == 0
    of_load = (kv, context, compensation, prompt_budget, speculation, gamma, backend, layers_on_device)
    chosen = any(one is not None for one in of_load)
    # How a runtime answers also depends on what it has cached, and how it has loaded a model is not for `run` to say.
    shared = text and not (attach or mcp or repeats or chosen or goes_on) and running(services) is not None
    if shared and result_of(_answer_by_runtime(stored, services, output, text, settings, own, raw=raw)):
        return
    # An answer that is asked to repeat waits for all of the tuning, so as to be the same again.
    later = bool(text) and not repeats
    budgets_asked = compensation is not None or prompt_budget is not None
    loaded = load_model(stored, asked, services, output, budgets_asked=budgets_asked, prompts_later=later)

    from app.cli.talk import Talk
    from app.local import LocalRuntime

    runtime = LocalRuntime(loaded)
    talk = Talk(runtime, result_of(runtime.status()), settings, own, output, raw=raw, count=runtime.tokens)
    try:
        saving = contextlib.ExitStack()
        if talk.status.base and not raw:
            output.note(_("{name} is {kind}", name=loaded.name, kind=_(CONTINUES)))
        if goes_on:
            talk.go_on(_last_chat())
            talk.left = _save
            saving.callback(lambda: _save(talk.conversation))
        if mcp is not None:
            result_of(talk.open_tools(mcp, yes_tools or ()))
        for path in attach or ():
            result_of(talk.attach(path.absolute()))
        if text:
            with saving:
                result_of(_answer(talk, stored, output, text))
            tune_pending_prompts(loaded, services, output)
        else:
            from app.cli.repl import Repl, line_history

            def opened(model: StoredModel, wanted: Compensation | None) -> LoadedModel:
                asked = options_of(model, compensation=wanted)
                return load_model(model, asked, services, output, budgets_asked=wanted is not None)

            changing = _Changing(talk, stored, compensation, opened, services, output)
            with line_history(services.home() / "lines"), saving:
                Repl(talk, output, models=changing.models, change=changing).loop()
    finally:
        result_of(talk.close())


class _Changing:
    """Changes the model of a conversation, or its budget. What can't be loaded leaves it as it was."""

    def __init__(
        self,
        talk: Talk,
        model: StoredModel,
        wanted: Compensation | None,
        opened: Callable[[StoredModel, Compensation | None], LoadedModel],
        services: Services,
        output: Output,
    ) -> None:
        """Begin.

        Args:
            talk: The conversation.
            model: What answers now.
            wanted: The compensation that the command line asks for.
            opened: Loads a model.
            services: Have the models.
            output: Gets progress and notes.
        """
        self._talk, self._model, self._wanted = talk, model, wanted
        self._opened, self._services, self._output = opened, services, output

    def models(self) -> list[str]:
        """Names of the models that are stored, and of the bundled one."""
        return list(dict.fromkeys([DEMO, *(info.name for info in self._services.store().list())]))

    def __call__(self, name: str | None, budget: float | Exact | None) -> None:
        """Load a model by its name, or the present one with a budget; None is the usual one."""
        model, wanted = self._model, self._wanted
        if name is None:
            wanted = options.compensation(budget) or Compensation()
        else:
            model = open_model(name, self._services, self._output)
            wanted = wanted and replace(wanted, or_usual=True)  # what was asked for of one model
        result_of(self._talk.runtime.aclose())  # two may not fit
        try:
            loaded = self._opened(model, wanted)
            self._model, self._wanted = model, wanted
        except BaseException:
            self._use(self._opened(self._model, self._wanted))
            raise
        self._use(loaded)

    def _use(self, loaded: LoadedModel) -> None:
        from app.local import LocalRuntime

        runtime = LocalRuntime(loaded)
        self._talk.use(runtime, result_of(runtime.status()))


def _preset(name: str, system: str | None, *, raw: bool) -> str:
    """The system prompt of a preset.

    Raises:
        CliError: there is none of that name.
    """
    from app.presets import load

    if raw or system is not None:
        raise typer.BadParameter(_("it is the system prompt: leave out --system and --raw"), param_hint="--template")
    presets = load()
    if name not in presets:
        raise CliError(_("there is no preset {name!r}: choose one of {names}", name=name, names=", ".join(presets)))
    return presets[name]


def _schema(file: Path) -> dict[str, Any]:
    """A JSON schema.

    Raises:
        CliError: the file cannot be read, or holds no schema that can be enforced.
    """
    from runtime.errors import RequestError
    from runtime.system.foreign import read_json
    from runtime.text.constraint import Grammar

    try:
        found = read_json(file.read_bytes())
        if not isinstance(found, dict):
            raise CliError(_("{file} holds no JSON object, so it is no schema", file=file))
        Grammar.of_schema(found)
    except (OSError, ValueError, RequestError) as error:
        raise CliError(f"{file}: {in_one_line(error)}") from error
    return found


def _last_chat() -> Conversation:
    """The chat that was last written to; a new one if there is none."""
    from app.history.store import History
    from app.paths import history_file

    conversation = Conversation()
    if not history_file().is_file():
        return conversation
    with contextlib.closing(History(history_file())) as history:
        chats = history.chats()
        if chats:
            last = max(chats, key=lambda chat: chat.updated)
            conversation.restore(last.id, history.messages(last.id), last.head)
            conversation.extras = last.extras
    return conversation


def _save(conversation: Conversation) -> None:
    """Save a chat's messages."""
    from app.history.store import History
    from app.paths import history_file

    if len(conversation):
        history_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.closing(History(history_file())) as history:
            history.record(conversation.id, conversation.head, conversation)


async def _answer_by_runtime(
    model: StoredModel,
    services: Services,
    output: Output,
    text: str,
    settings: Settings,
    own: Mapping[str, Any],
    *,
    raw: bool,
) -> bool:
    """Have the runtime that is up answer, if it has loaded this very model: its answer begins at once.

    Returns:
        Whether it has.
    """
    from app.cli.serve import running_client

    client = await running_client(model.name, services)
    if client is None:
        return False
    from app.cli.talk import Talk

    talk = Talk(client, await client.status(), settings, own, output, raw=raw)
    try:
        await _answer(talk, model, output, text)
    finally:
        await talk.close()
    return True


async def _answer(talk: Talk, model: StoredModel, output: Output, text: str) -> None:
    """Print one answer, or its JSON object.

    Raises:
        KeyboardInterrupt: Ctrl-C stopped it.
    """
    from dataclasses import asdict

    from app.cli.talk import called
    from runtime.wire.codec import to_json

    messages = await talk.ask(text)
    if messages[-1].state == "stopped":
        raise KeyboardInterrupt
    timings, status, passages = talk.timings, talk.status, messages[0].passages
    assert timings is not None, "a runtime of this version gives them"
    if output.as_json:
        output.result(
            {
                "text": "".join(message.text for message in messages),
                "finish_reason": talk.finish_reason,
                "prompt_tokens": timings.prompt_tokens,
                "completion_tokens": timings.completion_tokens,
                "ttft_s": timings.ttft_s,
                "decode_tokens_per_s": timings.decode_tokens_per_s,
                "model": model.name,
                "backend": status.backend,
                "bits": model.recipe.bits,
                "kv": status.kv,
                "k_chunk": timings.k_chunk,
                "speculation": None if timings.speculation is None else asdict(timings.speculation),
                "passages": None if passages is None else [to_json(passage) for passage in passages],
                "tool_calls": called(messages),
            }
        )
    elif talk.ending:
        output.note(talk.ending)


def _on_terminal() -> bool:
    return bool(sys.stdin) and sys.stdin.isatty() and sys.stdout.isatty()


def _text(data: bytes) -> str:
    """Standard input as text.

    Raises:
        CliError: it is not UTF-8 text.
    """
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        text, where = "\0", error.start
    else:
        where = text.find("\0")
    if "\0" in text:
        raise CliError(
            _(
                "standard input is not UTF-8 text (byte {at:,}): give a document with --attach, and other text "
                "through iconv -t UTF-8",
                at=where + 1,
            )
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _prompt(argument: str | None, output: Output) -> str:
    """PROMPT and standard input, separated by an empty line; standard input is read unless it is a terminal."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty():
        waiting = threading.Timer(_PATIENCE_S, output.note, [_("waiting for the end of standard input")])
        waiting.daemon = True
        waiting.start()
        try:
            data = sys.stdin.buffer.read()
        finally:
            waiting.cancel()
        piped = _text(data)
    return "\n\n".join(part for part in (argument or "", piped.rstrip("\n")) if part.strip())
