"""Descriptions of the machine and the tuning for the device screen, as (name, text) lines. Independent of widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.amounts import duration
from app.prospects import recommended
from app.tui.figures import SEPARATOR, percent
from runtime.compensation import layer_kind, layer_words
from runtime.errors import byte_count

if TYPE_CHECKING:
    from runtime.wire.device import DeviceReport, PromptTuning, Prospect, Tuning
    from tuner.curve import Curve
    from tuner.placement import ExpertPlacement

Lines = list[tuple[str, str]]


def found_words(report: DeviceReport) -> str:
    """The detected machine, in two sentences."""
    cpu, gpu, memory = (_part(report.machine, key) for key in ("cpu", "gpu", "memory"))
    cores, card = cpu.get("usable_cores") or 1, gpu.get("name")
    found = f"{cpu.get('name', 'A processor')}, {cores} core{'s' if cores > 1 else ''}"
    found = _joined([found, _room(memory.get("available_bytes"), memory.get("total_bytes"))])
    if card and gpu.get("memory_free_bytes"):
        room = _room(gpu["memory_free_bytes"], gpu.get("memory_total_bytes"))
        return f"{found}. Models run on {card} ({room})."
    without = f"no driver responds for {card}" if card else "no graphics card was found"
    speed = f", which reads its memory at {report.bandwidth_gb_s:.0f} GB/s" if report.bandwidth_gb_s else ""
    return f"{found}. Models run on the processor{speed}; {without}."


def welcome_words(found: Sequence[Prospect], *, offline: bool, model: str) -> str:
    """The greeting for users who have only the bundled model.

    Args:
        found: the models that could be downloaded.
        offline: whether there is no network.
        model: the bundled model's name.
    """
    here = f"You are chatting with {model}, a tiny bundled model that only demonstrates the program."
    if offline:
        return (
            f"There is no network, so nothing can be downloaded now. {here} F2 makes a model from a folder or a GGUF "
            "file that you have."
        )
    fitting = [one for one in found if one.fits != "no"]
    best = recommended(found)
    if best is None:
        return f"{here} F2 gets a larger one: {len(fitting)} of {len(found)} known models fit this machine now."
    speed = "" if best.tokens_per_s is None else f"about {best.tokens_per_s:.0f} tokens per second, "
    return (
        f"{here} F2 gets a real one: {best.title} suits this machine best ({speed}"
        f"{byte_count(best.download_bytes)} to download), and {len(fitting) - 1} others fit."
    )


def machine_lines(report: DeviceReport) -> Lines:
    """The detected and measured facts; unknown ones are left out."""
    machine, bandwidth_gb_s = report.machine, report.bandwidth_gb_s
    lines = [("CPU", _cpu(_part(machine, "cpu")))]
    gpu = _part(machine, "gpu")
    lines.append(("GPU", _gpu(gpu) if gpu else "none found"))
    if pcie := _pcie(_part(machine, "pcie") or _part(gpu, "pcie")):
        lines.append(("PCIe", pcie))
    memory = _part(machine, "memory")
    lines.append(("memory", _room(memory.get("available_bytes"), memory.get("total_bytes"))))
    lines.append(("bandwidth", f"{bandwidth_gb_s:.1f} GB/s read, measured" if bandwidth_gb_s else "not measured yet"))
    lines.append(("power", str(machine.get("power") or "")))
    lines.append(("runs on", _joined([machine.get("backend"), machine.get("reason")])))
    lines.append(
        ("blocks", f"{report.blocks} on the card, the others by the processor" if report.blocks is not None else "")
    )
    lines.append(("experts", _experts(report.experts) if report.experts is not None else ""))
    lines.append(("cache", report.cache))
    return [(name, words) for name, words in lines if words]


def _part(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}


def _joined(parts: Sequence[object]) -> str:
    return SEPARATOR.join(str(part) for part in parts if part)


def _room(free: float | None, total: float | None) -> str:
    if not total:
        return ""
    return f"{byte_count(free)} free of {byte_count(total)}" if free is not None else byte_count(total)


def _cpu(cpu: Mapping[str, Any]) -> str:
    usable, physical = cpu.get("usable_cores"), cpu.get("physical_cores")
    cores = f"{usable} of {physical} cores" if usable and physical else ""
    return _joined([cpu.get("name"), cores, f"kernels for {cpu['kernels']}" if cpu.get("kernels") else ""])


def _gpu(gpu: Mapping[str, Any]) -> str:
    memory = _room(gpu.get("memory_free_bytes"), gpu.get("memory_total_bytes"))
    compute, driver = gpu.get("compute_capability"), gpu.get("driver")
    return _joined(
        [gpu.get("name"), memory, f"compute {compute}" if compute else "", f"driver {driver}" if driver else ""]
    )


def _experts(placed: ExpertPlacement) -> str:
    beside = f"{byte_count(placed.host_bytes)} of others in main memory"
    where = f"{placed.on_device} of {placed.held} of each block on the card, {beside}"
    if placed.hit_rate is None:
        return where
    return f"{where}; {100 * placed.hit_rate:.0f} % of those chosen lately were on the card"


def _pcie(pcie: Mapping[str, Any]) -> str:
    generation, lanes, rate = pcie.get("generation"), pcie.get("lanes"), pcie.get("gb_s")
    measured = pcie.get("measured_gb_s")
    link = f"{generation}.0 ×{lanes}" if generation and lanes else ""
    return _joined(
        [link, f"{rate:.1f} GB/s at most" if rate else "", f"{measured:.1f} GB/s measured" if measured else ""]
    )


def tuning_lines(tuning: Tuning, prompts: PromptTuning | None = None) -> Lines:
    """Predicted and measured slowdowns of decoding and of prompts."""
    predicted, measured = tuning.predicted_slowdown_percent, tuning.measured_slowdown_percent
    taken = f"in {duration(tuning.seconds)}" if tuning.seconds else ""
    shown = [] if tuning.refined else [f"{percent(predicted)} predicted"]
    return [
        ("budget", f"{tuning.budget_percent:g} %"),
        ("slowdown", _joined([*shown, f"{percent(measured)} measured"])),
        ("tuned", _joined([f"on {tuning.device}", taken, tuning.date[:10]])),
        ("choice", tuning.refinement),
        *([("prompts", prompts.words)] if prompts is not None else []),
    ]


def layer_rows(tuning: Tuning) -> list[list[str]]:
    """The table of layer types with its heading; n_tb only on devices that have thread blocks."""
    blocks = any(tuning.n_tb.values())
    rows = [["layer", "n_tb", "k_chunk"] if blocks else ["layer", "k_chunk"]]
    for kind, k_chunk in tuning.k_chunk.items():
        n_tb = [str(tuning.n_tb.get(layer_kind(kind), "–"))] if blocks else []
        rows.append([layer_words(kind), *n_tb, str(k_chunk)])
    return rows


def chosen_curve(curves: Sequence[Curve], n_tb: int) -> Curve:
    """The curve of the chosen n_tb, or of the nearest one that was measured."""
    return min(curves, key=lambda curve: abs(curve.n_tb - n_tb))
