"""Arguments and options shared by several commands."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import typer

from app.language import _
from app.reports import reported
from runtime.compensation import CHUNK, EXACT, LARGEST_BUDGET_PERCENT, Compensation
from runtime.drafting import LARGEST_GAMMA
from runtime.errors import RequestError
from runtime.kv.kinds import KINDS, SPECULATIVE_KV, KVKind

T = TypeVar("T")
Backend = Literal["auto", "triton", "cpu", "reference"]
Select = Literal["approx", "exact", "static", "random"]


def _finite(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter(_("not a number"))
    return value


def set_within(ctx: typer.Context, param: typer.CallbackParam, value: T) -> T:  # noqa: ARG001  typer gives both
    """Check an option by the rule of the setting of the same name, so that ranges agree.

    An option that takes text also takes `auto` where the setting does; whoever loads the settings converts it.
    """
    from app.settings import RULES

    if value is not None and param.name is not None:
        rule = RULES[param.name]
        try:
            rule.parse(value)
        except (ValueError, OverflowError):
            rule = rule if isinstance(value, str) else replace(rule, optional=False)
            raise typer.BadParameter(_("it must be {allowed}", allowed=rule.allowed)) from None
    return value


def compensation(
    budget: str | float | None, k_chunk: int | None = None, prompt_budget: float | None = None
) -> Compensation | None:
    """Compensation requested by the options `Budget`, or `BudgetOrExact`, and `KChunk`; None: not specified.

    `PromptBudget` is separate, see `runtime.compensation.of_settings`, but for exact answers, which have none.

    Raises:
        typer.BadParameter: both are given, or one beside `EXACT`.
    """
    if budget is None and k_chunk is None:
        return None
    from app.settings import rule_of

    wanted: Any = None if budget is None else rule_of("budget").parse(budget)
    try:
        return Compensation.asked(k_chunk, wanted, prompt_budget if wanted == EXACT else None)
    except RequestError as error:
        raise typer.BadParameter(reported(str(error)), param_hint="--budget") from error


def speculate_setting(speculate: bool | None) -> str | None:
    """The option `Speculation` as a value of the setting `speculate`; None: not specified."""
    return None if speculate is None else "on" if speculate else "off"


def check_speculation(speculate: bool | None, gamma: int | None, kv: KVKind | None = None) -> None:
    """Check the options `Speculation`, `Gamma` and `KVOption` for conflicts.

    Raises:
        typer.BadParameter: they conflict.
    """
    if gamma is not None and not speculate:
        raise typer.BadParameter(_("it only applies with --speculate"), param_hint="--gamma")
    if gamma is not None and kv is not None and not KINDS[kv].has_draft:
        raise typer.BadParameter(
            _(
                "drafts of so many tokens need the {wanted} cache, not {kv}: leave out one of them",
                wanted=SPECULATIVE_KV,
                kv=kv,
            ),
            param_hint="--gamma",
        )


def complete_stored(incomplete: str) -> list[str]:
    """Complete names of stored models."""
    from app.cli.services import Services

    return [info.name for info in Services().store().list() if info.name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Complete names of stored, bundled and downloadable models."""
    from app.cli.services import DEMO
    from models.catalogue import SHORT_NAMES

    stored = complete_stored(incomplete)
    return [*(name for name in (DEMO, *SHORT_NAMES) if name.startswith(incomplete) and name not in stored), *stored]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A stored model, a short name of F2's list, such as smollm2-135m or qwen3-0.6b (downloaded on first use), "
        "demo, a folder with a Hugging Face checkpoint, a GGUF file, or a hub name.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
ModelOrUsual = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="As for run; default: the model in the settings, else demo.",
        autocompletion=complete_model,
        show_default=False,
    ),
]


def _write_plainly(asked: bool) -> None:
    if asked:
        os.environ["NO_COLOR"] = "1"


Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        callback=_write_plainly,
        help="Only add to the output, for screen readers: no colours, no bars. As NO_COLOR=1.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to standard output.")]
KVOption = Annotated[
    KVKind | None,
    typer.Option(
        "--kv",
        help="Precision of the key-value cache: int4 (the default, 28 % of fp16's bytes); int8 (half of them, the "
        "default of models whose answers int4 was found to damage); fp16 "
        "(exact); hierarchical (8 bits; the model's own drafts read 4); kcvt4, gear-l4, gear4 (4 bits by key channel, "
        "and with GEAR's corrections); kivi2, gear-l2, gear2 (2 bits: clearly worse).",
        show_default=False,
    ),
]
KChunk = Annotated[
    int | None,
    typer.Option(
        "--k-chunk",
        min=0,
        max=CHUNK,
        help="Salient channels compensated per 1024 input channels of every layer; 0: none.",
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="PCT",
        min=0,
        max=LARGEST_BUDGET_PERCENT,
        callback=_finite,
        help="Slowdown of decoding that compensation may cause, in percent; 0: no compensation.",
        show_default=False,
    ),
]
BudgetOrExact = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="PCT|exact",
        callback=set_within,
        help="Slowdown of decoding that compensation may cause, in percent; 0: no compensation. exact: answer token "
        "for token as the full-precision checkpoint that MODEL was made from, whose own weights verify what the "
        "low-bit ones draft. It has to be there, and in memory beside them; only on the processor.",
        show_default=False,
    ),
]
PromptBudget = Annotated[
    float | None,
    typer.Option(
        "--prompt-budget",
        metavar="PCT",
        min=0,
        max=LARGEST_BUDGET_PERCENT,
        callback=_finite,
        help="Delay of the first word that compensating the prompt may cause, in percent; 0: no compensation.",
        show_default=False,
    ),
]
Speculation = Annotated[
    bool | None,
    typer.Option(
        "--speculate/--no-speculate",
        help="Draft tokens and verify several at a time: the same answers, faster. Drafts are copied from the text so "
        "far, or made by the model's head that predicts further tokens, where that pays, unless --no-speculate. With "
        "--speculate a model without one also drafts with its low-bit weights alone, faster where much is compensated, "
        "and the cache is hierarchical unless --kv says otherwise.",
        show_default=False,
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--gamma",
        metavar="N",
        min=1,
        max=LARGEST_GAMMA,
        help="Tokens that the model drafts in each round, with nothing copied; requires --speculate; default: adapted.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        callback=set_within,
        help="Tokens of context; default: as many as fit in memory, up to a limit.",
        show_default=False,
    ),
]
ExpertsOnDevice = Annotated[
    str | None,
    typer.Option(
        "--experts-on-device",
        metavar="N|auto",
        callback=set_within,
        help="Of a mixture, the experts of each block that are kept on the graphics card; the others are read from "
        "main memory. Default: auto, as many as fit.",
        show_default=False,
    ),
]
LayersOnDevice = Annotated[
    str | None,
    typer.Option(
        "--layers-on-device",
        metavar="N|auto",
        callback=set_within,
        help="The model's first blocks that are kept on the graphics card; the processor runs the others. Default: "
        "auto, as many as fit.",
        show_default=False,
    ),
]
BackendOption = Annotated[
    Backend | None, typer.Option("--backend", help="Backend that runs the model.", show_default=False)
]
