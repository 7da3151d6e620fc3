"""`lowbit-chat doctor`: this machine, the program's choices and their reasons, problems with advice, tuning results."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.amounts import byte_count, prompt_words, refinement
from app.cli import options
from app.cli.output import Output
from app.cli.services import DEMO, Services, services_of
from app.language import _
from app.reports import reported
from runtime.errors import Problem

if TYPE_CHECKING:
    from models.store import Store, StoredModel
    from runtime.backends import AnyBackend, Presence
    from tuner.detect import Machine
    from tuner.gpu import GpuInfo


_GIB = 1 << 30
_MIN_MEMORY = 1 * _GIB
_MIN_DISK = 5 * _GIB
_LARGE_REMAINS = 256 << 20
_HUB_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The backend that would run a model here."""

    backend: str
    reason: str
    """The reason, in one sentence."""
    variant: str | None
    """Instruction set of the CPU kernels; None if they cannot be built."""


def choose(presences: Mapping[str, Presence]) -> tuple[Choice, list[Problem]]:
    """The backend a model would get, and the problems of the others.

    Args:
        presences: Whether each backend can run here, best first.
    """
    from runtime.backends import backend

    first = next(name for name, presence in presences.items() if presence.usable)
    lacking: dict[str, str] = {}  # By the reason, which backends on one card share
    for name, presence in presences.items():
        if not presence.usable:
            lacking.setdefault(presence.reason, name)
    problems = [
        Problem(
            what=_("{backend} is not used: {reason}", backend=reported(backend(name).label), reason=reported(reason)),
            fix=reported(fix),
        )
        for reason, name in lacking.items()
        if (fix := presences[name].fix) is not None
    ]
    behind = list(presences)[: list(presences).index(first)]
    skipped = [reason for reason, name in lacking.items() if name in behind]
    reason = reported("; ".join([*skipped, presences[first].reason]))
    if first != "shared" and (both := presences.get("shared")) is not None and both.usable:
        reason = _(
            "{reason}; {backend} runs what does not fit the card",
            reason=reason,
            backend=reported(backend("shared").label),
        )
    return Choice(backend=first, reason=reason, variant=presences["cpu"].variant), problems


def versions() -> dict[str, str | None]:
    """Versions of the dependencies, without importing them; None for those not installed."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("lowbit-chat", "torch", "numba", "triton", "transformers", "textual"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = None
    return installed


def check_packages(installed: dict[str, str | None]) -> list[Problem]:
    """Missing packages, apart from those without which stored models run on a processor."""
    from models.errors import LEFT_OUT

    needed = [name for name in installed if name not in LEFT_OUT]
    return [
        Problem(
            what=_("the package {name} is not installed", name=name),
            fix=_("reinstall the program with its dependencies"),
        )
        for name in needed
        if installed[name] is None
    ]


def check_memory(machine: Machine) -> list[Problem]:
    """Whether there is enough memory for even a small model."""
    memory = machine.memory
    if memory.available_bytes >= _MIN_MEMORY:
        return []
    from runtime.load.memory import largest_process

    holder = largest_process()
    return [
        Problem(
            what=_(
                "only {free} of {total} memory is free",
                free=byte_count(memory.available_bytes),
                total=byte_count(memory.total_bytes),
            ),
            fix=_("close other programs ({holder}), or give the container more", holder=reported(holder))
            if holder
            else _("close other programs, or give the container more"),
        )
    ]


def check_link(used: Presence) -> list[Problem]:
    """Whether the link of the card in use is fast enough for compensation, or unknown."""
    from runtime.load.prospects import link_problems

    found = link_problems(used.gpu)
    return [replace(problem, what=reported(problem.what), fix=reported(problem.fix)) for problem in found]


def check_folders(folders: dict[str, Path]) -> Iterator[Problem]:
    """Whether the program's folders are writable, have space, and are closed to others."""
    for role, folder in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            yield Problem(
                what=_("the {role} folder {folder} can't be written", role=_(role), folder=folder),
                fix=_("change the permissions of {folder}, or set LOWBIT_CHAT_HOME to another folder", folder=existing),
            )
        elif (free := shutil.disk_usage(existing).free) < _MIN_DISK and role == "model":
            yield Problem(
                what=_("only {size} of disk is free for models in {folder}", size=byte_count(free), folder=folder),
                fix=_("remove models (lowbit-chat rm NAME), or set LOWBIT_CHAT_HOME to a larger disk"),
            )
        if os.name == "posix" and role != "cache" and folder.is_dir() and folder.stat().st_mode & 0o077:
            yield Problem(
                what=_("other users of this machine can read the {role} folder {folder}", role=_(role), folder=folder),
                fix=f"chmod 700 {folder}",
            )


def check_settings() -> list[Problem]:
    """Whether the settings can be read."""
    from app.paths import settings_file
    from app.settings import SettingsError, load

    try:
        load()
    except SettingsError as error:
        return [
            Problem(
                what=str(error), fix=_("correct {file} or the variable that the message names", file=settings_file())
            )
        ]
    return []


def check_store(store: Store) -> Iterator[Problem]:
    """Whether stored models are complete, as far as a quick look can tell."""
    from models.errors import ModelError

    try:
        infos, damaged = store.list(), store.damaged()
    except ModelError as error:
        yield Problem(
            what=reported(str(error)),
            fix=_("change the folder's permissions, or set LOWBIT_CHAT_HOME to another one"),
        )
        return
    for entry in damaged:
        yield Problem(
            what=_("{name} is damaged: {reason}", name=entry.folder, reason=reported(entry.reason)),
            fix=_("delete it from {folder}", folder=store.root),
        )
    for info in infos:
        try:
            store.open(info.name)
        except ModelError as error:
            yield Problem(
                what=_("{name} is damaged: {reason}", name=info.name, reason=reported(str(error))),
                fix=_("lowbit-chat rm {name}, and quantize it again", name=info.name),
            )


def check_remains(store: Store, lock_home: Path) -> Iterator[Problem]:
    """Leftovers of crashed or killed processes."""
    from runtime.server.lock import is_alive, lock_path, read_lock

    lock = lock_path(lock_home)
    record = read_lock(lock)
    if lock.exists() and (record is None or not is_alive(record)):
        yield Problem(
            what=_("a runtime process that has ended left behind {file}", file=lock),
            fix=_("start the program once, or delete the file"),
        )
    work = store.root / ".work"
    for folder in sorted(work.iterdir()) if work.is_dir() else []:
        held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if held >= _LARGE_REMAINS:
            name = folder.name.replace("--", "/", 1)
            yield Problem(
                what=_("an unfinished {name} takes {size}", name=name, size=byte_count(held)),
                fix=_("quantize it again to finish it, or lowbit-chat rm {name}", name=name),
            )


def check_hub() -> list[Problem]:
    import httpx

    from models.hub.transport import without_login

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Problem(what=_("HF_HUB_OFFLINE forbids the hub"), fix=_("unset HF_HUB_OFFLINE to download models"))]
    try:
        httpx.head(f"{endpoint}/api/models", timeout=_HUB_PATIENCE_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [
            Problem(
                what=_("{host} does not answer: {error}", host=without_login(endpoint), error=error),
                fix=_("check the network, HTTPS_PROXY and HF_ENDPOINT; models that are here already run without it"),
            )
        ]
    return []


def all_problems(
    services: Services, machine: Machine, used: Presence, found: dict[str, str | None], *, hub: bool
) -> list[Problem]:
    """All problems, in the order in which to look at them."""
    from app import paths

    store = services.store()
    folders = {"home": paths.home(), "model": store.root, "cache": paths.cache_dir()}
    checks: list[Callable[[], list[Problem]]] = [
        lambda: check_packages(found),
        lambda: check_memory(machine),
        lambda: check_link(used),
        lambda: list(check_folders(folders)),
        check_settings,
        lambda: list(check_store(store)),
        lambda: list(check_remains(store, paths.home())),
        *([check_hub] if hub else []),
    ]
    return [problem for check in checks for problem in check()]


def doctor(
    ctx: typer.Context,
    hub: Annotated[bool, typer.Option("--hub", help="Also check whether the hub responds.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what this machine has, what the program chose and why, and what is wrong."""
    output, services = Output(as_json=as_json), services_of(ctx)
    machine, installed = services.machine(), versions()
    presences = services.presences()
    choice, problems = choose(presences)
    problems += all_problems(services, machine, presences[choice.backend], installed, hub=hub)
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
    named = ", ".join(f"{name} {version or _('missing')}" for name, version in installed.items())
    lines = [*_lines(replace(machine, gpus=gpus), report, services), (_("versions"), named)]
    for problem in problems:
        lines += [(_("problem"), problem.what), (f"    {_('fix')}", problem.fix)]
    output.fields(lines, 10)
    if not problems:
        output.text(_("no problems found"))


def _chosen_first(gpus: tuple[GpuInfo, ...], presences: Mapping[str, Presence]) -> tuple[GpuInfo, ...]:
    """The cards, starting with the one that a backend would use: the driver and CUDA number them differently."""
    chosen = {presence.gpu.uuid for presence in presences.values() if presence.gpu is not None} - {None}
    return tuple(sorted(gpus, key=lambda gpu: gpu.uuid not in chosen))


def _link(gpus: Sequence[GpuInfo], services: Services) -> dict[str, Any] | None:
    """The first card's link to main memory, with its measured bandwidth."""
    if not gpus or gpus[0].pcie is None:
        return None
    return {**asdict(gpus[0].pcie), "measured_gb_s": services.link_gb_s()}


def _lines(machine: Machine, report: dict[str, Any], services: Services) -> list[tuple[str, str]]:
    cpu, memory = machine.cpu, machine.memory
    speed = report["memory"]["read_gb_s"]
    lines = [
        (
            "cpu",
            _(
                "{name}, {usable} of {physical} cores, kernels for {kernels}",
                name=cpu.name,
                usable=cpu.usable_cores,
                physical=cpu.physical_cores,
                kernels=report["cpu"]["kernels"],
            ),
        ),
        (
            _("memory"),
            _(
                "{free} of {total} free, read at {speed:.1f} GB/s",
                free=byte_count(memory.available_bytes),
                total=byte_count(memory.total_bytes),
                speed=speed,
            ),
        ),
    ]
    for gpu in machine.gpus:
        room = f", {byte_count(gpu.memory_total_bytes)}" if gpu.memory_total_bytes is not None else ""
        lines.append(("gpu", gpu.name + room))
        if gpu.pcie is not None:
            link = f"{gpu.name}{room}, PCIe {gpu.pcie.generation} x{gpu.pcie.lanes}"
            lines[-1] = ("gpu", _("{link}, {speed:.1f} GB/s at most", link=link, speed=gpu.pcie.gb_s))
    measured = report["pcie"] and report["pcie"]["measured_gb_s"]
    if measured:
        lines.append((_("link"), _("the card reads main memory at {speed:.1f} GB/s, measured", speed=measured)))
    if not machine.gpus:
        lines.append(("gpu", _("none")))
    lines.append((_("backend"), f"{report['backend']}: {report['reason']}"))
    if report["tuning"] is not None:
        names = {"reason": _("tuning"), "prompts": _("prompts"), "offer": _("offer")}
        told = {name: report["tuning"][key] for key, name in names.items()}
        lines += [(name, f"{report['tuning']['model']}: {text}") for name, text in told.items() if text is not None]
    lines.append((_("models"), str(services.store().root)))
    return lines


def profile_report(services: Services, backend_name: str) -> dict[str, Any] | None:
    """The profile that the model of the settings (or the bundled one) would use here, and an explanation.

    Args:
        services: The program's stores.
        backend_name: The backend that would run it.

    Returns:
        `model`, `budget_percent`, `k_chunk`, `measured_slowdown_percent`, `reason`, and as text `prompts` and `offer`,
        the best way to decode within the budget (None if not measured); None if settings or model cannot be read, which
        other checks report.
    """
    from app.settings import SettingsError, load
    from models.errors import ModelError

    try:
        settings = load()
        name = settings.model or DEMO
        model = services.demo() if name == DEMO else services.store().open(name)
    except (SettingsError, ModelError):
        return None
    from runtime.backends import backend
    from runtime.backends.decoder import DecoderOptions
    from runtime.budget.profile_key import profile_key
    from runtime.budget.tuning import obstacle, tuning_of
    from runtime.compensation import layer_words
    from runtime.errors import BackendError

    compensation = settings.compensation()
    budget = compensation.budget_percent
    report: dict[str, Any] = {
        "model": name,
        "budget_percent": budget,
        "k_chunk": None,
        "measured_slowdown_percent": None,
        "reason": "",
        "prompts": _("prompts are not compensated"),
        "offer": None,
    }
    runner = backend(backend_name)
    problem = obstacle(runner, model, model.spec.max_context)
    if problem is None and budget:
        report["offer"] = _offer(services, runner, model, budget)
    if problem is None and compensation.prompt_percent:
        report["prompts"] = _prompts(services, runner, model, compensation.prompt_percent)
    if compensation.exact:
        return {**report, "reason": _("answers are exact, so nothing is compensated")}
    if budget is None:
        return {**report, "reason": _("k_chunk is fixed at {k_chunk} by the settings", k_chunk=compensation.k_chunk)}
    if not budget:
        return {**report, "reason": _("the slowdown budget is 0, so nothing is compensated")}
    if problem is not None:
        return {**report, "reason": reported(problem.what)}
    try:
        device = runner.device(DecoderOptions())
    except BackendError as error:
        return {**report, "reason": reported(str(error))}
    profile = services.profiles().find(profile_key(device, backend_name, model))
    if budget not in profile.tuned:
        reason = _(
            "not tuned yet for {budget:g} % slowdown; the first use tunes it, or run: lowbit-chat tune-device {name}",
            budget=budget,
            name=name,
        )
        return {**report, "reason": reason}
    found = tuning_of(profile, budget, cached=True)
    chosen = ", ".join(f"{reported(layer_words(kind))} {count}" for kind, count in found.k_chunk.items())
    measured = found.measured_slowdown_percent
    return {
        **report,
        "k_chunk": dict(found.k_chunk),
        "measured_slowdown_percent": measured,
        "reason": _(
            "k_chunk {chosen}; {measured:.1f} % slower, {budget:g} % allowed, measured on {date}; {refinement}",
            chosen=chosen,
            measured=measured,
            budget=budget,
            date=profile.date[:10],
            refinement=refinement(found),
        ),
    }


def _prompts(services: Services, runner: AnyBackend, model: StoredModel, budget_percent: float) -> str:
    """The stored tuning of prompts, as text."""
    from runtime.backends.decoder import DecoderOptions
    from runtime.budget.profile_key import profile_key
    from runtime.budget.prompt_tuning import known_prompts, prompt_tuning_of
    from runtime.errors import BackendError

    try:
        device = runner.device(DecoderOptions())
    except BackendError as error:
        return reported(str(error))
    profile = known_prompts(services.profiles().find(profile_key(device, runner.name, model)), budget_percent)
    if profile is None:
        return _(
            "prompts are not tuned yet for {budget:g} % more time to the first word; the first use tunes them",
            budget=budget_percent,
        )
    return prompt_words(prompt_tuning_of(profile, cached=True))


def _offer(services: Services, runner: AnyBackend, model: StoredModel, budget_percent: float) -> str | None:
    """The best way to decode within a budget, as text; None if `tune-device` has not measured any."""
    from runtime.budget.offering import known
    from runtime.errors import BackendError

    try:
        found = known(runner.name, model, budget_percent=budget_percent, profiles=services.profiles())
    except BackendError:
        return None
    return None if found is None else reported(found.words(found.chosen))
