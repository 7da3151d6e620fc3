"""What the device screen says of the machine and of the tuning, as (name, words) lines. Knows no widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.amounts import byte_count, duration
from app.tui.figures import SEPARATOR, percent

if TYPE_CHECKING:
    from runtime.wire.device import PromptTuning, Tuning
    from tuner.curve import Curve

Lines = list[tuple[str, str]]


def machine_lines(machine: Mapping[str, Any], bandwidth_gb_s: float | None) -> Lines:
    """What was detected and measured; what is not known is left out."""
    lines = [("CPU", _cpu(_part(machine, "cpu")))]
    gpu = _part(machine, "gpu")
    lines.append(("GPU", _gpu(gpu) if gpu else "none was found"))
    if pcie := _pcie(_part(machine, "pcie") or _part(gpu, "pcie")):
        lines.append(("PCIe", pcie))
    memory = _part(machine, "memory")
    lines.append(("memory", _room(memory.get("available_bytes"), memory.get("total_bytes"))))
    lines.append(("bandwidth", f"{bandwidth_gb_s:.1f} GB/s read, measured" if bandwidth_gb_s else "not measured yet"))
    lines.append(("runs on", _joined([machine.get("backend"), machine.get("reason")])))
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


def _pcie(pcie: Mapping[str, Any]) -> str:
    generation, lanes, rate = pcie.get("generation"), pcie.get("lanes"), pcie.get("gb_s")
    measured = pcie.get("measured_gb_s")
    link = f"{generation}.0 ×{lanes}" if generation and lanes else ""
    return _joined(
        [link, f"{rate:.1f} GB/s at most" if rate else "", f"{measured:.1f} GB/s measured" if measured else ""]
    )


def tuning_lines(tuning: Tuning, prompts: PromptTuning | None = None) -> Lines:
    """What the tuner promised and what was measured, of decoding and of prompts."""
    predicted, measured = tuning.predicted_slowdown_percent, tuning.measured_slowdown_percent
    taken = f"in {duration(tuning.seconds)}" if tuning.seconds else ""
    return [
        ("budget", f"{tuning.budget_percent:g} %"),
        ("slowdown", _joined([f"{percent(predicted)} predicted", f"{percent(measured)} measured"])),
        ("tuned", _joined([f"on {tuning.device}", taken, tuning.date[:10]])),
        *([("prompts", prompts.words)] if prompts is not None else []),
    ]


def layer_rows(tuning: Tuning) -> list[list[str]]:
    """The table of layer types, its heading first; n_tb only where blocks mean something."""
    blocks = any(tuning.n_tb.values())
    rows = [["layer", "n_tb", "k_chunk"] if blocks else ["layer", "k_chunk"]]
    for kind, k_chunk in tuning.k_chunk.items():
        n_tb = [str(tuning.n_tb.get(kind, "–"))] if blocks else []
        rows.append([kind, *n_tb, str(k_chunk)])
    return rows


def chosen_curve(curves: Sequence[Curve], n_tb: int) -> Curve:
    """Of one layer type's curves, that of the chosen n_tb, or of the nearest one."""
    return min(curves, key=lambda curve: abs(curve.n_tb - n_tb))
