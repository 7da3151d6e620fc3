"""Descriptions of the machine and the tuning for the device screen, as (name, text) lines. Independent of widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.amounts import byte_count, duration, prompt_words, refinement
from app.language import _, localized, ngettext
from app.prospects import recommended
from app.reports import reported
from app.tui.figures import SEPARATOR, percent
from runtime.compensation import layer_kind, layer_words

if TYPE_CHECKING:
    from runtime.wire.device import DeviceReport, PromptTuning, Prospect, Tuning
    from tuner.curve import Curve
    from tuner.placement import ExpertPlacement

Lines = list[tuple[str, str]]


def found_words(report: DeviceReport) -> str:
    """The detected machine, in two sentences."""
    cpu, gpu, memory = (_part(report.machine, key) for key in ("cpu", "gpu", "memory"))
    cores, card = cpu.get("usable_cores") or 1, gpu.get("name")
    found = ngettext("{cpu}, {count} core", "{cpu}, {count} cores", cores, cpu=cpu.get("name", _("A processor")))
    found = _joined([found, _room(memory.get("available_bytes"), memory.get("total_bytes"))])
    if card and gpu.get("memory_free_bytes"):
        room = _room(gpu["memory_free_bytes"], gpu.get("memory_total_bytes"))
        return _("{found}. Models run on {card} ({room}).", found=found, card=card, room=room)
    without = _("no driver responds for {card}", card=card) if card else _("no graphics card was found")
    if not report.bandwidth_gb_s:
        return _("{found}. Models run on the processor; {without}.", found=found, without=without)
    return _(
        "{found}. Models run on the processor, which reads its memory at {speed:.0f} GB/s; {without}.",
        found=found,
        speed=report.bandwidth_gb_s,
        without=without,
    )


def welcome_words(found: Sequence[Prospect], *, offline: bool, model: str) -> str:
    """The greeting for users who have only the bundled model."""
    here = _("You are chatting with {model}, a tiny bundled model that only demonstrates the program.", model=model)
    if offline:
        return _(
            "There is no network, so nothing can be downloaded now. {here} F2 makes a model from a folder or a GGUF "
            "file that you have.",
            here=here,
        )
    fitting = [one for one in found if one.fits != "no"]
    best = recommended(found)
    if best is None:
        return _(
            "{here} F2 gets a larger one: {fitting} of {known} known models fit this machine now.",
            here=here,
            fitting=len(fitting),
            known=len(found),
        )
    cost = _("{size} to download", size=byte_count(best.download_bytes))
    if best.tokens_per_s is not None:
        cost = _("about {speed:.0f} tokens per second, {cost}", speed=best.tokens_per_s, cost=cost)
    return _(
        "{here} F2 gets a real one: {title} suits this machine best ({cost}), and {count} others fit.",
        here=here,
        title=best.title,
        cost=cost,
        count=len(fitting) - 1,
    )


def machine_lines(report: DeviceReport) -> Lines:
    """The detected and measured facts; unknown ones are left out."""
    machine, bandwidth_gb_s = report.machine, report.bandwidth_gb_s
    lines = [("CPU", _cpu(_part(machine, "cpu")))]
    gpu = _part(machine, "gpu")
    lines.append(("GPU", _gpu(gpu) if gpu else _("none found")))
    if pcie := _pcie(_part(machine, "pcie") or _part(gpu, "pcie")):
        lines.append(("PCIe", pcie))
    memory = _part(machine, "memory")
    lines.append((_("memory"), _room(memory.get("available_bytes"), memory.get("total_bytes"))))
    lines.append(
        (
            _("bandwidth"),
            _("{speed:.1f} GB/s read, measured", speed=bandwidth_gb_s) if bandwidth_gb_s else _("not measured yet"),
        )
    )
    lines.append((_("power"), reported(str(machine.get("power") or ""))))
    lines.append((_("runs on"), _joined([machine.get("backend"), reported(machine.get("reason") or "")])))
    lines.append(
        (
            _("blocks"),
            _("{blocks} on the card, the others by the processor", blocks=report.blocks)
            if report.blocks is not None
            else "",
        )
    )
    lines.append((_("experts"), _experts(report.experts) if report.experts is not None else ""))
    lines.append((_("cache"), report.cache))
    return [(name, words) for name, words in lines if words]


def _part(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}


def _joined(parts: Sequence[object]) -> str:
    return SEPARATOR.join(str(part) for part in parts if part)


def _room(free: float | None, total: float | None) -> str:
    if not total:
        return ""
    return (
        _("{free} free of {total}", free=byte_count(free), total=byte_count(total))
        if free is not None
        else byte_count(total)
    )


def _cpu(cpu: Mapping[str, Any]) -> str:
    usable, physical = cpu.get("usable_cores"), cpu.get("physical_cores")
    cores = _("{usable} of {physical} cores", usable=usable, physical=physical) if usable and physical else ""
    return _joined([cpu.get("name"), cores, _("kernels for {name}", name=cpu["kernels"]) if cpu.get("kernels") else ""])


def _gpu(gpu: Mapping[str, Any]) -> str:
    memory = _room(gpu.get("memory_free_bytes"), gpu.get("memory_total_bytes"))
    compute, driver = gpu.get("compute_capability"), gpu.get("driver")
    return _joined(
        [
            gpu.get("name"),
            memory,
            _("compute {compute}", compute=compute) if compute else "",
            _("driver {driver}", driver=driver) if driver else "",
        ]
    )


def _experts(placed: ExpertPlacement) -> str:
    beside = _("{size} of others in main memory", size=byte_count(placed.host_bytes))
    where = _(
        "{on_device} of {held} of each block on the card, {beside}",
        on_device=placed.on_device,
        held=placed.held,
        beside=beside,
    )
    if placed.hit_rate is None:
        return where
    return _("{where}; {share:.0f} % of those chosen lately were on the card", where=where, share=100 * placed.hit_rate)


def _pcie(pcie: Mapping[str, Any]) -> str:
    generation, lanes, rate = pcie.get("generation"), pcie.get("lanes"), pcie.get("gb_s")
    measured = pcie.get("measured_gb_s")
    link = f"{generation}.0 ×{lanes}" if generation and lanes else ""
    return _joined(
        [
            link,
            _("{rate:.1f} GB/s at most", rate=rate) if rate else "",
            _("{measured:.1f} GB/s measured", measured=measured) if measured else "",
        ]
    )


def tuning_lines(tuning: Tuning, prompts: PromptTuning | None = None) -> Lines:
    """Predicted and measured slowdowns of decoding and of prompts."""
    predicted, measured = tuning.predicted_slowdown_percent, tuning.measured_slowdown_percent
    taken = _("in {time}", time=duration(tuning.seconds)) if tuning.seconds else ""
    shown = [] if tuning.refined else [_("{percent} predicted", percent=percent(predicted))]
    return [
        (_("budget"), localized(f"{tuning.budget_percent:g} %")),
        (_("slowdown"), _joined([*shown, _("{percent} measured", percent=percent(measured))])),
        (_("tuned"), _joined([_("on {device}", device=tuning.device), taken, tuning.date[:10]])),
        (_("choice"), refinement(tuning)),
        *([(_("prompts"), prompt_words(prompts))] if prompts is not None else []),
    ]


def layer_rows(tuning: Tuning) -> list[list[str]]:
    """The table of layer types with its heading; n_tb only on devices that have thread blocks."""
    blocks = any(tuning.n_tb.values())
    rows = [[_("layer"), "n_tb", "k_chunk"] if blocks else [_("layer"), "k_chunk"]]
    for kind, k_chunk in tuning.k_chunk.items():
        n_tb = [str(tuning.n_tb.get(layer_kind(kind), "–"))] if blocks else []
        rows.append([reported(layer_words(kind)), *n_tb, str(k_chunk)])
    return rows


def chosen_curve(curves: Sequence[Curve], n_tb: int) -> Curve:
    """The curve of the chosen n_tb, or of the nearest one that was measured."""
    return min(curves, key=lambda curve: abs(curve.n_tb - n_tb))
