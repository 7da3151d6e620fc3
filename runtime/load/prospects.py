"""This machine, and the memory and speed that models would have on it before they are downloaded.

Sizes are exact, computed from the layout of stored models. Whether a model fits follows from the memory plan of a load
and the memory that is free now. Speed comes from the tuner's cost model. Makes no requests, and does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.catalogue import CatalogueModel
from models.recipe import Recipe, chosen_method
from models.spec import ModelSpec
from runtime.backends import ModelSizes, backend, backends
from runtime.errors import BackendError, OutOfMemoryError, Problem
from runtime.load.expected import missed_share, on_both, on_card, on_processor
from runtime.load.memory import DEFAULT_CONTEXT, MemoryPlan, plan
from runtime.system.power import power_words
from runtime.wire.answers import Status
from runtime.wire.device import DeviceReport, Prospect
from tuner.detect import MemoryInfo
from tuner.devices import DeviceSpec
from tuner.gpu import GpuInfo
from tuner.simulate import card_named

if TYPE_CHECKING:
    from models.store.layout import Sizes


BITS = (4.0, 3.5, 3.0)
"""Bits per weight to choose from, best first."""
_ENOUGH_CONTEXT = 2048
"""Bits are reduced to reach a context of this many tokens, but not for a longer one."""
_MAKING_CORE_S = 7.3e-7
"""Core-seconds to quantize a weight with the default recipe: SmolLM2-135M took 49 s on two cores."""
_FEW_LANES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The machine that models must fit."""

    backend: str
    """Backend that would run them."""
    available_bytes: int
    """Free memory for weights and cache: on the card, or main memory."""
    main_bytes: int
    cores: int
    read_gb_s: float | None = None
    """Measured read bandwidth of main memory; None if unknown."""
    card: DeviceSpec | None = None
    """The card, if its specifications are known."""


def room_of(report: DeviceReport, status: Status) -> Room:
    """Describe this machine. Memory of the loaded model counts as free, since it would be unloaded."""
    machine, held = report.machine, (status.weight_bytes or 0) + (status.kv_bytes or 0)
    gpu: Mapping[str, Any] = machine.get("gpu") or {}
    free: int | None = gpu.get("memory_free_bytes") if gpu.get("vendor", "nvidia") == "nvidia" else None
    name = machine.get("backend") or ("triton" if free else "cpu")
    name = "triton" if name == "shared" else name
    main = int((machine.get("memory") or {}).get("available_bytes") or 0)
    on_card, blocks = name == "triton", report.blocks
    there = 0 if not on_card else held if blocks is None else held * blocks.on_device // blocks.held
    return Room(
        backend=name,
        available_bytes=(free or 0) + there if on_card else main + held,
        main_bytes=main + held - there,
        cores=int((machine.get("cpu") or {}).get("usable_cores") or 1),
        read_gb_s=report.bandwidth_gb_s,
        card=card_named(str(gpu.get("name"))) if on_card else None,
    )


def prospects(catalogue: Sequence[CatalogueModel], room: Room) -> list[Prospect]:
    """The prospects of every model in a catalogue. Takes half a second at first: call it in a worker thread."""
    return [_prospect(model, room) for model in catalogue]


def _prospect(model: CatalogueModel, room: Room) -> Prospect:
    spec = model.spec
    taken = _sizes(spec)
    usual = min(spec.max_context, DEFAULT_CONTEXT)
    chosen, context, needed = None, 0, 0
    planned: MemoryPlan | None = None
    for bits, own in taken.items():
        try:
            planned = _planned(spec, bits, own, room)
        except (OutOfMemoryError, BackendError):  # or the backend does not run such models
            needed = own.device + own.residuals
            continue
        rest = 0 if planned.rest is None else planned.rest.needed_bytes
        chosen, context, needed = bits, planned.context, planned.needed_bytes + rest
        if context >= min(usual, _ENOUGH_CONTEXT) and (planned.rest is None or spec.mixture is not None):
            break
    size = taken[chosen or BITS[-1]]
    whole = chosen == BITS[0] and context == usual and not (planned and (planned.host_bytes or planned.rest))
    speed = _speed(spec, chosen or BITS[-1], size.active, planned, room)
    return Prospect(
        title=model.title,
        source=model.source,
        maker=model.maker,
        good_for=model.good_for,
        leads=model.leads,
        license=model.license,
        gated=model.gated,
        verified=model.verified,
        form=model.form,
        download_bytes=model.download_bytes,
        parameters=model.parameters,
        active_share=size.active / size.device * (1 - spec.token_weights / model.parameters),
        max_context=spec.max_context,
        sizes=tuple(taken[bits].device for bits in sorted(BITS)),
        residual_bytes=taken[BITS[0]].residuals,
        bits=chosen,
        fits="no" if chosen is None else "yes" if whole else "tight",
        needed_bytes=needed,
        context=context,
        blocks=None if planned is None else planned.blocks_of(spec),
        tokens_per_s=speed,
        making_s=_MAKING_CORE_S * model.parameters / room.cores,
    )


@lru_cache(maxsize=128)
def _sizes(spec: ModelSpec) -> Mapping[float, Sizes]:
    """What a model takes by bits per weight. Only the room changes, and a mixture has tens of thousands of matrices."""
    from models.store.layout import sizes

    return {bits: sizes(spec, _recipe(spec, bits)) for bits in BITS}


def _recipe(spec: ModelSpec, bits: float) -> Recipe:
    """The default recipe; between 3 and 4 bits every other block has 4, and which ones does not affect the size."""
    mixed = tuple(4 - at % 2 for at in range(spec.num_layers)) if bits % 1 else None
    method = chosen_method("auto", latent=spec.latent is not None)
    return Recipe(method=method, bits=bits, block_bits=mixed)


def _planned(spec: ModelSpec, bits: float, size: Sizes, room: Room) -> MemoryPlan:
    """A load's memory plan, that of the faster backend if a card's has experts in main memory.

    Raises:
        OutOfMemoryError: it does not fit now.
        BackendError: no backend runs such a model.
    """
    plans: list[MemoryPlan] = []
    for name in ("triton", "shared") if room.backend == "triton" else (room.backend,):
        try:
            plans.append(_planned_on(name, spec, bits, size, room))
        except (OutOfMemoryError, BackendError) as error:
            failure = error
            continue
        if not plans[-1].host_bytes:
            break
    if not plans:
        raise failure
    return max(plans, key=lambda planned: _speed(spec, bits, size.active, planned, room) or 0.0)


def _planned_on(name: str, spec: ModelSpec, bits: float, size: Sizes, room: Room) -> MemoryPlan:
    weights, residuals = size.device, size.residuals
    runner = backend(name)
    footprint = runner.footprint(
        spec,
        ModelSizes(weight_bytes=weights, residual_bytes=residuals, recipe=_recipe(spec, bits)),
        compensated=True,
    )
    free, least = room.available_bytes, footprint.weight_bytes - footprint.experts * footprint.expert_bytes
    most = free if footprint.parts is None else free + room.main_bytes
    if least > most or residuals > room.main_bytes:  # a plan would look for reasons and remedies
        raise OutOfMemoryError("the weights do not fit")
    memory, main = (
        MemoryInfo(total_bytes=free_bytes, available_bytes=free_bytes, limit_bytes=None)
        for free_bytes in (free, room.main_bytes)
    )
    return plan(spec, footprint, shared=True, rows=runner.step_rows[-1], memory=memory, main=main)


def _speed(spec: ModelSpec, bits: float, active_bytes: int, planned: MemoryPlan | None, room: Room) -> float | None:
    """Expected tokens per second; of experts that do not all fit a card, on what is faster (`plan_load`)."""
    processor = None if room.read_gb_s is None else on_processor(spec, active_bytes, room.read_gb_s)
    if room.card is None:
        return processor if room.backend == "cpu" else None
    if planned is not None and planned.layers_on_device is not None:
        if room.read_gb_s is None:
            return None
        return on_both(spec, bits, room.card, planned.layers_on_device, active_bytes, room.read_gb_s)
    if planned is None or not planned.host_bytes or spec.mixture is None:
        return on_card(spec, bits, room.card)
    card = on_card(spec, bits, room.card, missed=missed_share(spec.mixture, planned.experts_on_device))
    return max(card, processor or 0.0)


def link_problems(gpu: GpuInfo | None) -> list[Problem]:
    """Problems of the link between a card and main memory, which compensation reads across."""
    if gpu is None:
        return []
    if gpu.pcie is None:
        what = f"how {gpu.name} is connected to main memory is unknown, so only measuring tells what its link can do"
        return [Problem(what=what, fix="update the card's driver, or look with: nvidia-smi -q")]
    if gpu.pcie.lanes < _FEW_LANES:
        what = f"{gpu.name} uses {gpu.pcie.lanes} PCIe lanes, so little can be compensated"
        return [Problem(what=what, fix="put it into a slot with more lanes, or look at the mainboard's settings")]
    return []


def link_gb_s() -> float | None:
    """Measured bandwidth of the link that residuals cross; None if no usable backend has one."""
    speeds = (backend.link_gb_s() for backend in backends())
    return next((speed for speed in speeds if speed is not None), None)


class MachineInspector:
    """Inspects this machine. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._gb_s: float | None = None
        self._link_gb_s: float | None = None

    def __call__(self, idle: bool) -> DeviceReport:
        """The report of this machine; the memory is measured once, when idle."""
        from tuner.detect import detect

        machine = detect()
        gpu = machine.gpus[0] if machine.gpus else None
        return DeviceReport(
            machine={
                "cpu": asdict(machine.cpu),
                "power": power_words(),
                "memory": asdict(machine.memory),
                "gpu": None if gpu is None else asdict(gpu),
                "pcie": self._link(gpu, idle=idle),
            },
            bandwidth_gb_s=self._bandwidth(idle=idle),
            problems=link_problems(gpu),
        )

    def _link(self, gpu: GpuInfo | None, *, idle: bool) -> dict[str, Any] | None:
        if gpu is None or gpu.pcie is None:
            return None
        with self._lock:
            if self._link_gb_s is None and idle:
                self._link_gb_s = link_gb_s()
            return {**asdict(gpu.pcie), "measured_gb_s": self._link_gb_s}

    def _bandwidth(self, *, idle: bool) -> float | None:
        with self._lock:
            if self._gb_s is None and idle:
                from tuner.bandwidth import read_bandwidth

                self._gb_s = read_bandwidth(self._folder).gb_s
            return self._gb_s
