"""One plan of a load, for commands and for the server."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assets import demo_path
from models.progress import ProgressCallback, ignore_progress
from models.spec import MixtureSpec
from models.store import StoredModel
from runtime.backends import Footprint, Presence, backend
from runtime.compensation import Compensation
from runtime.errors import BackendError, OutOfMemoryError, RequestError
from runtime.kv.groups import cache_bytes
from runtime.kv.kinds import KINDS
from runtime.load import plan as loading
from runtime.load.open import Candidate
from runtime.load.plan import LoadPlan, plan_load
from tuner.detect import MemoryInfo
from tuner.gpu import GpuInfo

KINDS_OF_LAYERS = ("qkv", "o", "gate_up", "down", "head")


def room(mib: int = 8 << 10) -> MemoryInfo:
    return MemoryInfo(total_bytes=64 << 30, available_bytes=mib << 20, limit_bytes=None)


def planned(compensation: Compensation | None = None, **options: Any) -> LoadPlan:
    model = StoredModel.open_folder(demo_path(), "demo")
    wanted: dict[str, Any] = {"backend_name": "reference", "memory": room(), **options}
    return plan_load(model, compensation or Compensation(k_chunk=0), **wanted)


def test_the_options_are_what_was_asked_for() -> None:
    plan = planned(Compensation(k_chunk={"o": 3}), kv="int8", context=128, slots=3, select="exact")
    options = plan.options
    assert (options.kv, options.context, options.slots, options.select) == ("int8", 128, 3, "exact")
    assert options.pages == plan.memory.pages == KINDS["int8"].max_pages(128)
    assert options.k_chunk == {**dict.fromkeys(KINDS_OF_LAYERS, 0), "o": 3}
    assert (plan.backend_name, plan.backend.name) == ("reference", "reference")


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_steps_have_the_rows_that_the_backend_takes(name: str) -> None:
    plan = planned(backend_name=name, kv="int4", slots=2)
    assert (plan.options.max_rows,) == backend(name).step_rows
    assert plan.memory.kv_bytes == cache_bytes(
        KINDS["int4"], plan.model.spec, context=plan.memory.context, slots=plan.memory.slots,
        max_rows=plan.options.max_rows, pages=plan.memory.pages,
    )  # fmt: skip


def test_steps_have_as_many_rows_as_cost_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*choices: int) -> list[LoadPlan]:
        monkeypatch.setattr(backend("cpu"), "step_rows", choices)
        return [planned(backend_name="cpu", kv="int4", slots=2, memory=room(mib)) for mib in range(260, 280)]

    chosen, fewest = found(512, 256, 128), found(128)
    assert [(plan.memory.context, plan.memory.slots) for plan in chosen] == [
        (plan.memory.context, plan.memory.slots) for plan in fewest
    ]
    assert all(plan.memory.fits for plan in chosen)
    assert [plan.options.max_rows for plan in chosen] == sorted(plan.options.max_rows for plan in chosen)
    assert {plan.options.max_rows for plan in chosen} == {128, 256, 512}


def test_a_model_that_does_not_fit_a_card_is_opened_by_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned for the next one must not be opened by the first again."""

    def found(card_mib: int) -> LoadPlan:
        card = Presence(usable=True, reason="a card", memory=room(card_mib))
        chosen = [Candidate(backend=backend("cpu"), presence=card, reason="best")]
        chosen.append(Candidate(backend=backend("reference"), presence=backend("reference").probe(), reason="next"))
        monkeypatch.setattr(loading, "candidates", lambda _asked: iter(chosen))
        return planned(backend_name="auto")

    small, large = found(100), found(8 << 10)
    assert (small.backend.name, small.backend_name, small.memory.available_bytes) == ("reference", "reference", 8 << 30)
    assert (large.backend.name, large.backend_name) == ("cpu", "auto")


@pytest.mark.parametrize("faster", [None, "the processor is faster"])
@pytest.mark.parametrize("asked", [None, 2])
def test_experts_that_do_not_fit_a_card_are_read_by_what_is_expected_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, faster: str | None, asked: int | None, tmp_path: Path
) -> None:
    """A number that was asked for decides; so does the card where the processor can't run the model."""
    model = StoredModel.open_folder(demo_path(), "demo")
    model.spec = replace(model.spec, mixture=MixtureSpec(experts=4, chosen=2, width=8, normalized=True))
    compared: list[Path | None] = []

    def compare(*asked: Any) -> str | None:
        compared.append(asked[-1])
        return faster

    monkeypatch.setattr(loading, "processor_is_faster", compare)
    footprints = {
        "reference": Footprint(weight_bytes=8 << 20, experts=4, expert_bytes=2 << 20),
        "cpu": Footprint(weight_bytes=8 << 20),
    }
    for name, weighed in footprints.items():
        monkeypatch.setattr(backend(name), "footprint", lambda *_, found=weighed, **__: found)
    gpu = GpuInfo(
        vendor="nvidia", name="card", driver="1", memory_total_bytes=None, memory_free_bytes=None,
        compute_capability="8.9", pcie=None,
    )  # fmt: skip
    card = Presence(usable=True, reason="a card", memory=room(264), gpu=gpu)
    beside = Presence(usable=True, reason="beside")

    def found(main_mib: int) -> LoadPlan:
        offered = (("reference", card), ("cpu", beside))
        every = [Candidate(backend=backend(name), presence=one, reason="") for name, one in offered]
        monkeypatch.setattr(loading, "candidates", lambda _asked: iter(every))
        limits: dict[str, Any] = {"context": 64, "memory": room(main_mib), "experts_on_device": asked}
        return plan_load(model, Compensation(k_chunk=0), **limits, measurements=tmp_path)

    plan, card_s = found(1000), faster is None or asked is not None
    assert compared == ([tmp_path] if asked is None else [])
    assert plan.backend.name == ("reference" if card_s else "cpu")
    assert plan.passed_over == (None if card_s else faster)
    assert plan.options.experts_on_device == (plan.memory.experts_on_device if card_s else None)
    assert found(262).backend.name == "reference", "the processor has no room for the whole model"


def test_before_a_budget_is_spent_nothing_is_compensated() -> None:
    assert planned(Compensation(budget_percent=5)).options.k_chunk == dict.fromkeys(KINDS_OF_LAYERS, 0)


@pytest.mark.parametrize("budget", [0, 5])
def test_a_backend_is_told_whether_it_will_compensate(monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    told: list[tuple[object, ...]] = []
    runner = backend("reference")
    footprint = runner.footprint

    def weigh(spec: Any, sizes: Any, *, compensated: bool) -> Any:
        told.append(("footprint", compensated))
        assert sizes.residual_bytes > 0
        return footprint(spec, sizes, compensated=compensated)

    def prepare(model: Any, kv: str, *, compensated: bool, ahead: bool, progress: ProgressCallback) -> None:
        assert not ahead
        told.append((model.name, kv, compensated, progress))

    monkeypatch.setattr(runner, "footprint", weigh)
    monkeypatch.setattr(runner, "prepare", prepare)
    planned(Compensation(budget_percent=budget), kv="int4").prepare(ignore_progress)
    assert told == [("footprint", budget > 0), ("demo", "int4", budget > 0, ignore_progress)]


def test_what_is_opened_is_what_was_planned() -> None:
    plan = planned(Compensation(k_chunk=4), context=64)
    decoder, engine = plan.open_decoder(), plan.open_engine()
    assert decoder.options == engine.decoder.options == plan.options
    assert decoder.backend == engine.decoder.backend == "reference"
    assert engine.name == "demo"
    decoder.close()
    engine.close()


def test_what_cannot_be_planned(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendError, match="triton, cpu, reference"):
        planned(backend_name="metal")
    for context in (0, 10**6):
        with pytest.raises(RequestError, match=f"context of {context} tokens"):
            planned(context=context)
    with caplog.at_level(logging.WARNING), pytest.raises(OutOfMemoryError, match="100 MiB is free now"):
        planned(backend_name="auto", memory=room(mib=100))
    assert not caplog.records, "no other backend takes less of main memory, so none is tried"
