"""`lowbit-chat doctor`: this machine, the program's choices and their reasons, and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.amounts import byte_count
from app.cli import checks, options
from app.cli.output import Output
from app.cli.services import Services, services_of
from app.cli.tuned import profile_report

if TYPE_CHECKING:
    from runtime.backends import Presence
    from tuner.detect import Machine
    from tuner.gpu import GpuInfo


def doctor(
    ctx: typer.Context,
    hub: Annotated[bool, typer.Option("--hub", help="Also check whether the hub responds.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what this machine has, what the program chose and why, and what is wrong."""
    output, services = Output(as_json=as_json), services_of(ctx)
    machine, versions = services.machine(), checks.versions()
    presences = services.presences()
    choice, problems = checks.choose(presences)
    problems += checks.all_problems(services, machine, presences[choice.backend], versions, hub=hub)
    read_gb_s = services.bandwidth(fresh=False).gb_s
    gpus = _chosen_first(machine.gpus, presences)
    report = {
        "ok": not problems,
        "gpu": asdict(gpus[0]) if gpus else None,
        "cpu": {**asdict(machine.cpu), "kernels": choice.variant},
        "memory": {**asdict(machine.memory), "read_gb_s": read_gb_s},
        "pcie": _link(gpus, services),
        "backend": choice.backend,
        "reason": choice.reason,
        "tuning": profile_report(services, choice.backend),
        "problems": [{"what": problem.what, "fix": problem.fix} for problem in problems],
    }
    if as_json:
        output.result(report)
        return
    for line in _lines(replace(machine, gpus=gpus), report, services):
        output.text(line)
    output.text("versions  " + ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()))
    for problem in problems:
        output.text(f"problem   {problem.what}")
        output.text(f"    fix   {problem.fix}")
    if not problems:
        output.text("no problems found")


def _chosen_first(gpus: tuple[GpuInfo, ...], presences: Mapping[str, Presence]) -> tuple[GpuInfo, ...]:
    """The cards, starting with the one that a backend would use: the driver and CUDA number them differently."""
    chosen = {presence.gpu.uuid for presence in presences.values() if presence.gpu is not None} - {None}
    return tuple(sorted(gpus, key=lambda gpu: gpu.uuid not in chosen))


def _link(gpus: Sequence[GpuInfo], services: Services) -> dict[str, Any] | None:
    """The first card's link to main memory, with its measured bandwidth."""
    if not gpus or gpus[0].pcie is None:
        return None
    return {**asdict(gpus[0].pcie), "measured_gb_s": services.link_gb_s()}


def _lines(machine: Machine, report: dict[str, Any], services: Services) -> list[str]:
    cpu, memory = machine.cpu, machine.memory
    speed = report["memory"]["read_gb_s"]
    cores = f"{cpu.usable_cores} of {cpu.physical_cores} cores"
    free = f"{byte_count(memory.available_bytes)} of {byte_count(memory.total_bytes)}"
    lines = [
        f"cpu       {cpu.name}, {cores}, kernels for {report['cpu']['kernels']}",
        f"memory    {free} free, read at {speed:.1f} GB/s",
    ]
    for gpu in machine.gpus:
        room = f", {byte_count(gpu.memory_total_bytes)}" if gpu.memory_total_bytes is not None else ""
        pcie = f", PCIe {gpu.pcie.generation} x{gpu.pcie.lanes}, {gpu.pcie.gb_s:.1f} GB/s at most" if gpu.pcie else ""
        lines.append(f"gpu       {gpu.name}{room}{pcie}")
    measured = report["pcie"] and report["pcie"]["measured_gb_s"]
    if measured:
        lines.append(f"link      the card reads main memory at {measured:.1f} GB/s, measured")
    if not machine.gpus:
        lines.append("gpu       none")
    lines.append(f"backend   {report['backend']}: {report['reason']}")
    if report["tuning"] is not None:
        lines.append(f"tuning    {report['tuning']['model']}: {report['tuning']['reason']}")
        lines.append(f"prompts   {report['tuning']['model']}: {report['tuning']['prompts']}")
        if report["tuning"]["offer"] is not None:
            lines.append(f"offer     {report['tuning']['model']}: {report['tuning']['offer']}")
    lines.append(f"models    {services.store().root}")
    return lines
