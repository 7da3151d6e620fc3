"""`tune-device` and `lowbit-chat tune-device`: compensation within a slowdown budget, and the ways to decode in it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.amounts import prompt_words
from app.cli import options
from app.cli.load import load_options, load_plan
from app.cli.model import open_model
from app.cli.output import CliError, Interrupt, Output, plain, write_output
from app.cli.services import DEMO, Services, services_of
from app.errors import hint
from app.language import _, localized, number
from app.reports import reported

if TYPE_CHECKING:
    from models.store import StoredModel
    from models.store.certificate import Certificate
    from runtime.load.plan import LoadOptions
    from runtime.wire.device import PromptTuning
    from tuner.curve import Curve
    from tuner.offers import Offers
    from tuner.search import Configuration
    from tuner.shapes import LayerShape


_CONTEXT = 512
"""Context of a model that is loaded for tuning."""
_BITS, _METHOD = 4.0, "awq"
"""Default simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A result to show, measured or simulated."""

    title: str
    device: str
    budget_percent: float
    found: Configuration
    measured_slowdown_percent: float | None
    seconds: float
    cached: bool
    layers: Sequence[LayerShape]
    curves: Sequence[Curve]
    prompts: PromptTuning | None = None
    offers: Offers | None = None
    won: float | None = None
    refined: bool = False
    certificate: Certificate | None = None
    """The model's, which ends with what the budget buys."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        simulated = self.measured_slowdown_percent is None
        return {
            "device": self.device,
            "budget_percent": self.budget_percent,
            "n_tb_max": self.found.n_tb_max,
            "n_tb": dict(self.found.n_tb),
            "k_chunk": dict(self.found.k_chunk),
            "predicted_slowdown_percent": self.found.predicted_slowdown_percent,
            "measured_slowdown_percent": self.measured_slowdown_percent,
            "seconds": self.seconds,
            "simulated" if simulated else "measured": True,
            "cached": self.cached,
            "prompts": None if self.prompts is None else asdict(self.prompts),
            "offer": None if self.offers is None else offers_json(self.offers),
            "certificate": None if self.certificate is None else asdict(self.certificate.ways[-1]),
        }


def tune_device(
    ctx: typer.Context,
    model: options.ModelOrUsual = None,
    budget: options.Budget = None,
    prompt_budget: options.PromptBudget = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            "--simulate", metavar="DEVICE", help="Simulate a device instead of measuring this one.", show_default=False
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="S", help="Model shape to simulate: llama-3-8b, ...", show_default=False),
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", metavar="B", help="Bits to simulate: 3, 3.5, 4.", show_default=False)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", metavar="M", help="Quantizer to simulate; default: awq.", show_default=False),
    ] = None,
    list_devices: Annotated[
        bool, typer.Option("--list-devices", help="List the devices that can be simulated.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="SVG file for a plot of the knee curves.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again even if there is a saved profile.")] = False,
    backend: options.BackendOption = None,
    as_json: options.Json = False,
) -> None:
    """Find the compensation that fits a slowdown budget, on this device or a simulated one."""
    output, services = Output(as_json=as_json), services_of(ctx)
    if list_devices:
        _list_devices(output)
        return
    _check_usage(model, budget, simulate, shape, bits, method)
    if plot is not None and plot.suffix.lower() != ".svg":
        raise typer.BadParameter(_("the plot is an SVG file: give a name that ends in .svg"), param_hint="--plot")
    if plot is not None and find_spec("matplotlib") is None:
        raise CliError(_("--plot needs matplotlib: install it, or lowbit-chat[plot], and try again"))
    if simulate is not None and shape is not None:
        result = _simulated(
            simulate, shape, bits or _BITS, method or _METHOD, _budget(budget), pictured=plot is not None
        )
    else:
        budgets = _Budgets(decode=_budget(budget), prompts=_prompt_budget(prompt_budget))
        result = _measured(model, budgets, force, backend, services, output)
    if plot is not None:
        from tuner.plot import svg

        write_output(plot, svg(result.curves, title=result.title))
    if as_json:
        output.result(result.to_json())
        return
    _show(result, output)
    if plot is not None:
        output.text(_("drawn into {file}", file=plot))


def _check_usage(
    model: str | None,
    budget: float | None,
    simulate: str | None,
    shape: str | None,
    bits: float | None,
    method: str | None,
) -> None:
    """Reject conflicting options."""
    if budget == 0:
        raise typer.BadParameter(
            _("a budget of 0 is no compensation, so there is nothing to tune"), param_hint="--budget"
        )
    if simulate is None and any(option is not None for option in (shape, bits, method)):
        raise typer.BadParameter(_("--shape, --bits and --method require --simulate"))
    if simulate is not None and shape is None:
        from tuner.shapes import SHAPES

        raise typer.BadParameter(_("--simulate needs the shape of a model: --shape {shapes}", shapes="|".join(SHAPES)))
    if simulate is not None and model is not None:
        raise typer.BadParameter(_("a simulation takes no MODEL, but --shape, --bits and --method"))


def _budget(asked: float | None) -> float:
    """The budget to tune for: the requested one, else that of the settings if it pays for compensation."""
    from app.settings import load
    from runtime.compensation import DEFAULT_BUDGET_PERCENT

    own = load().budget
    return asked or (own if isinstance(own, float) and own else DEFAULT_BUDGET_PERCENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budgets:
    """The budgets, in percent."""

    decode: float
    """Slowdown of decoding."""
    prompts: float
    """Slowdown of prompts."""


def _prompt_budget(asked: float | None) -> float:
    """The budget of prompts to tune for: the requested one, else that of the settings."""
    from app.settings import load
    from runtime.compensation import DEFAULT_PROMPT_BUDGET_PERCENT

    wanted = load().prompt_budget if asked is None else asked
    return DEFAULT_PROMPT_BUDGET_PERCENT if wanted is None else wanted


def _simulated(device: str, shape: str, bits: float, method: str, budget: float, *, pictured: bool) -> _Result:
    """Tune a simulated device.

    Raises:
        CliError: unknown device, shape or method.
        TunerError: bits that can't be simulated.
    """
    from models.recipe import CODEBOOK_METHODS, METHODS
    from tuner.curve import knee_curves
    from tuner.devices import DEVICES
    from tuner.shapes import SHAPES
    from tuner.simulate import tune_simulated

    if device not in DEVICES:
        near = hint(device, DEVICES, _("tune-device --list-devices shows all"))
        raise CliError(_("no device is called {name!r}; {hint}", name=device, hint=near))
    if shape not in SHAPES:
        near = hint(shape, SHAPES, _("there are {names}", names=", ".join(SHAPES)))
        raise CliError(_("no shape is called {name!r}; {hint}", name=shape, hint=near))
    if method not in METHODS:
        near = hint(method, METHODS, _("there are {names}", names=", ".join(METHODS)))
        raise CliError(_("no method is called {name!r}; {hint}", name=method, hint=near))
    began = time.perf_counter()
    found, layers, timer = tune_simulated(device, shape, bits, budget, codebook=method in CODEBOOK_METHODS)
    seconds = time.perf_counter() - began
    spec = DEVICES[device]
    return _Result(
        title=_(
            "{device}, {shape} at {bits:g} bits ({method}), simulated",
            device=spec.name,
            shape=shape,
            bits=bits,
            method=method,
        ),
        device=device,
        budget_percent=budget,
        found=found,
        measured_slowdown_percent=None,
        seconds=seconds,
        cached=False,
        layers=layers,
        curves=knee_curves(layers, timer, found, limit=spec.shared_bytes_per_block, others=pictured),
    )


def _measured(
    name: str | None,
    budgets: _Budgets,
    force: bool,
    backend: options.Backend | None,
    services: Services,
    output: Output,
) -> _Result:
    """Tune a model here, or load its saved profile.

    Raises:
        RuntimeFailure, ModelError, TunerError: tuning failed.
        KeyboardInterrupt: the user stopped it; completed measurements are stored.
    """
    from app.settings import load
    from runtime.budget.prompt_tuning import tune_prompts
    from runtime.budget.tuning import layers_of, refine, tune
    from runtime.load.certificate import certify_budget
    from runtime.text.tokenizer import Tokenizer
    from tuner.search import Configuration

    stored = open_model(name or load().model or DEMO, services, output)
    context = min(_CONTEXT, stored.spec.max_context)
    asked = load_options(stored, context=context, compensation=options.compensation(budgets.decode), backend=backend)
    plan = load_plan(stored, asked, services)
    with output.progress() as progress:
        plan.prepare(progress)
        decoder = plan.open_decoder(progress)
    try:
        with Interrupt() as interrupt, output.progress() as progress:
            common: Any = {
                "profiles": services.profiles(),
                "force": force,
                "progress": progress,
                "cancelled": interrupt.cancelled,
            }
            tuning = tune(decoder, stored, budget_percent=budgets.decode, **common)
            prompts = tune_prompts(decoder, stored, budget_percent=budgets.prompts, **common)
            encode, text = Tokenizer(stored.tokenizer_path).encode, services.evaluation_text()
            common.pop("force")
            tuning = refine(decoder, stored, tuning, text=text, encode=encode, **common)
            certificate = certify_budget(decoder, stored, budgets.decode, interrupt.cancelled)
        layers = layers_of(decoder)
    finally:
        decoder.close()
    return _Result(
        offers=offered(stored, decoder.backend, tuning.k_chunk, budgets.decode, asked, services, output, force=force),
        title=_("{model} at {bits} bits on {device}", model=stored.name, bits=stored.recipe.bits, device=tuning.device),
        device=tuning.device,
        budget_percent=budgets.decode,
        found=Configuration(
            n_tb_max=tuning.n_tb_max,
            n_tb=tuning.n_tb,
            k_chunk=tuning.k_chunk,
            predicted_slowdown_percent=tuning.predicted_slowdown_percent,
        ),
        won=tuning.predicted_loss_won / tuning.loss_without
        if tuning.loss_without and tuning.predicted_loss_won is not None
        else None,
        measured_slowdown_percent=tuning.measured_slowdown_percent,
        seconds=tuning.seconds,
        cached=tuning.cached,
        layers=layers,
        curves=tuning.curve,
        prompts=prompts,
        refined=tuning.refined,
        certificate=certificate,
    )


def _show(result: _Result, output: Output) -> None:
    """Show a result to the user."""
    from runtime.compensation import layer_kind, layer_words
    from tuner.plot import terminal

    found = result.found
    blocks = found.n_tb_max is not None
    output.text(result.title)
    output.text()
    rows = [[_("layer"), _("outputs"), _("inputs"), "k_chunk", *(["n_tb"] if blocks else []), _("slower")]]
    chosen = [curve for curve in result.curves if curve.n_tb == found.n_tb[curve.kind]]
    layers, curves = {layer.kind: layer for layer in result.layers}, {curve.kind: curve for curve in chosen}
    for key, k_chunk in found.k_chunk.items():
        kind = layer_kind(key)
        extra = [str(found.n_tb[kind])] if blocks else []
        share = localized(f"{100 * (_between(curves[kind].points, k_chunk) - 1):.1f} %")
        rows.append([reported(layer_words(key)), str(layers[kind].n), str(layers[kind].k), str(k_chunk), *extra, share])
    output.table(rows)
    output.text()
    size = shutil.get_terminal_size()
    color = sys.stdout.isatty() and not plain()
    output.picture(terminal(chosen, width=min(size.columns, 100), height=min(20, size.lines), color=color))
    output.text(_verdict(result))
    if result.prompts is not None:
        output.text(prompt_words(result.prompts))
    if result.certificate is not None:
        output.text(reported(result.certificate.line(result.certificate.ways[-1])))
    if result.offers is not None:
        for line in lines(result.offers):
            output.text(line)


def _between(points: Sequence[tuple[int, float]], k_chunk: int) -> float:
    """The time at k_chunk, interpolated between the timed points."""
    import numpy as np

    return float(np.interp(k_chunk, [at for at, _ in points], [time for _, time in points]))


def _verdict(result: _Result) -> str:
    predicted = result.found.predicted_slowdown_percent
    if result.measured_slowdown_percent is None:
        return _(
            "predicted slowdown {slower:.1f} % of the {budget:g} % allowed; simulated in {seconds:.2f} s",
            slower=predicted,
            budget=result.budget_percent,
            seconds=result.seconds,
        )
    parts = [
        _(
            "measured slowdown {slower:.1f} % of the {budget:g} % allowed ({how})",
            slower=result.measured_slowdown_percent,
            budget=result.budget_percent,
            how=_("refined on a text") if result.refined else _("the layers alone: {slower:.1f} %", slower=predicted),
        )
    ]
    if result.won is not None:
        parts.append(_("recovers about {share:.0%} of what low bits lose", share=result.won))
    parts.append(
        _("from the saved profile, which took {seconds:.1f} s", seconds=result.seconds)
        if result.cached
        else _("found in {seconds:.1f} s", seconds=result.seconds)
    )
    return "; ".join(parts)


def _list_devices(output: Output) -> None:
    from tuner.devices import DEVICES

    if output.as_json:
        output.result({"devices": [asdict(device) for device in DEVICES.values()]})
        return
    rows = [[_("device"), _("memory"), "GB/s", "PCIe GB/s", "SMs", _("name")]]
    for spec in DEVICES.values():
        memory = f"{spec.memory_bytes / (1 << 30):.0f} GiB"
        rows.append(
            [spec.id, memory, number(spec.memory_gb_s, "g"), number(spec.pcie_gb_s, "g"), str(spec.sm_count), spec.name]
        )
    output.table(rows)


def offered(
    stored: StoredModel,
    backend: str,
    k_chunk: Mapping[str, int],
    budget: float,
    asked: LoadOptions,
    services: Services,
    output: Output,
    *,
    force: bool,
) -> Offers | None:
    """The ways to decode a model that the budget chooses from; None if drafts are not supported.

    Raises:
        RuntimeFailure, ModelError: the measurement failed.
        KeyboardInterrupt: the user stopped it.
    """
    from assets import evaluation_text
    from runtime.budget.offering import WINDOW, full_precision, known, offers
    from runtime.kv.kinds import SPECULATIVE_KV
    from runtime.text.tokenizer import Tokenizer

    measured = None if force else known(backend, stored, budget_percent=budget, profiles=services.profiles())
    if measured is not None or (asked.context or 0) < WINDOW:
        return measured
    plan = load_plan(stored, replace(asked, kv=SPECULATIVE_KV), services)
    with output.progress() as progress:
        plan.prepare(progress)
        decoder = plan.open_decoder(progress)
    try:
        decoder.set_k_chunk(k_chunk)
        with Interrupt() as interrupt, output.progress() as progress:
            return offers(
                decoder,
                stored,
                Tokenizer(stored.tokenizer_path).encode(evaluation_text()),
                budget_percent=budget,
                full=full_precision(stored, evaluation_text()),
                profiles=services.profiles(),
                progress=progress,
                cancelled=interrupt.cancelled,
            )
    finally:
        decoder.close()


def offers_json(offers: Offers) -> dict[str, Any]:
    """The best way to decode within the budget, and all measured ones."""
    chosen = offers.chosen
    ways = [{**asdict(way), "words": offers.words(way)} for way in offers.ways]
    return {"target": chosen.target, "gamma": chosen.gamma, "words": offers.words(chosen), "ways": ways}


def lines(offers: Offers) -> Iterator[str]:
    """For the user: the best way first."""
    yield _("best within the budget: {way}", way=reported(offers.words(offers.chosen)))
    for way in offers.ways:
        if way != offers.chosen:
            yield _("  also measured: {way}", way=reported(offers.words(way)))
