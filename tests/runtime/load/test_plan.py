"""Plans of loads: which backend, how much memory, and what is opened."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assets import demo_path
from models.mtp import mtp_spec
from models.packed import Weights
from models.progress import ProgressCallback, ignore_progress
from models.recipe import Recipe
from models.spec import MixtureSpec
from models.store import StoredModel
from runtime.backends import Footprint, Presence, backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.compensation import Compensation
from runtime.errors import BackendError, OutOfMemoryError, RequestError
from runtime.kv.groups import cache_bytes
from runtime.kv.kinds import KINDS
from runtime.load import plan as planning
from runtime.load.memory import buffer_bytes
from runtime.load.plan import Candidate, LoadOptions, LoadPlan, plan_load
from tests.models.gguf.making import random_model, write_gguf
from tests.runtime.conftest import make_model, make_spec
from tuner.detect import MemoryInfo
from tuner.gpu import GpuInfo


def options(**changes: Any) -> DecoderOptions:
    return DecoderOptions(**{"context": 64, "max_rows": 4, "threads": 1, **changes})


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_a_backend_is_chosen_with_a_reason(backend: str) -> None:
    decoder, reason = planning.open_decoder(make_model(), options(), backend)
    assert decoder.backend == ("reference" if backend == "reference" else "cpu")
    assert "backend" in reason
    decoder.close()


def test_auto_falls_back_to_the_reference_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(model: Weights, options: DecoderOptions, progress: object) -> Decoder:
        raise BackendError("no compiler for this processor")

    monkeypatch.setattr(backend("cpu"), "open", unable)
    decoder, reason = planning.open_decoder(make_model(), options(), "auto")
    assert decoder.backend == "reference"
    assert "no compiler for this processor" in reason
    with pytest.raises(BackendError, match="no compiler"):
        planning.open_decoder(make_model(), options(), "cpu")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "runtime.backends.cpu.decoder", None)
    decoder, reason = planning.open_decoder(make_model(), options())
    assert decoder.backend == "reference"
    assert "cannot be built" in reason


def test_auto_passes_over_a_backend_that_does_not_run_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a card, it takes mixtures of experts; what a backend there refuses goes to the CPU."""
    mixture = MixtureSpec(experts=4, chosen=2, width=32, normalized=True)
    summary = SimpleNamespace(gpu_bytes=1 << 20, residual_bytes=1 << 20)
    model: Any = SimpleNamespace(
        spec=make_spec(mixture=mixture),
        info=SimpleNamespace(summary=summary),
        recipe=Recipe(),
        path=Path(),
        mtp=None,
    )
    memory = MemoryInfo(total_bytes=8 << 30, available_bytes=8 << 30, limit_bytes=None)
    there = Presence(usable=True, reason="there is a card", memory=memory)
    monkeypatch.setattr(backend("triton"), "probe", lambda: there)
    for taken in (mixture, replace(mixture, bias=True), replace(mixture, parallel_mlp=True)):
        model.spec = make_spec(mixture=taken)
        assert plan_load(model, LoadOptions(compensation=Compensation(k_chunk=0))).backend.name == "triton"

    def refused(*_: Any, **__: Any) -> Any:
        raise BackendError("no kernels for such experts: use the CPU backend")

    monkeypatch.setattr(backend("triton"), "footprint", refused)
    planned = plan_load(model, LoadOptions(compensation=Compensation(k_chunk=0)))
    assert planned.backend.name == planned.backend_name == "cpu"
    with pytest.raises(BackendError, match="no kernels for such experts: use the CPU backend"):
        plan_load(model, LoadOptions(compensation=Compensation(k_chunk=0), backend="triton"))
    with pytest.raises(RequestError, match="experts are not multiplied in full precision"):
        plan_load(model, LoadOptions(compensation=Compensation(exact=True)))


@pytest.mark.parametrize(("name", "least"), [("cpu", 1000), ("reference", 4 * 64 * 2 * 64)])
def test_a_block_that_predicts_further_tokens_is_planned_if_it_may_draft(name: str, least: int) -> None:
    spec = make_spec(max_context=512)
    summary = SimpleNamespace(gpu_bytes=1 << 20, residual_bytes=0)
    block = SimpleNamespace(spec=mtp_spec(spec))
    model: Any = SimpleNamespace(
        spec=spec, info=SimpleNamespace(summary=summary), recipe=Recipe(), path=Path(), mtp=block, mtp_bytes=1000
    )
    without, planned = (plan_load(model, LoadOptions(backend=name, speculation=drafts)) for drafts in (False, None))
    assert (without.options.mtp, without.memory.mtp_bytes, planned.options.mtp) == (False, 0, True)
    assert planned.memory.weight_bytes >= without.memory.weight_bytes + least
    rows, slots = planned.options.max_rows, planned.options.slots
    options = DecoderOptions(context=512, slots=slots, max_rows=rows, mtp=True)
    decoder = planning.open_decoder(make_model(spec, mtp=True), options, name)[0]
    held = decoder.mtp.kv_bytes  # type: ignore[attr-defined]
    cache = planned.memory.mtp_bytes - buffer_bytes(block.spec, 512, rows)
    assert cache <= held < 1.5 * cache, "records of so small heads are padded"
    assert decoder.kv_bytes == held + decoder.cache.nbytes  # type: ignore[attr-defined]
    decoder.close()


def test_an_answer_ends_where_the_model_or_its_tokenizer_says() -> None:
    model = make_model(make_spec(eos_token_ids=(77,)))
    model.tokenizer_path = demo_path()
    engine = planning.open_engine(model, options(), "reference")
    assert engine.tokenizer.eos_token_id not in (None, 77)
    assert engine._eos == {77, engine.tokenizer.eos_token_id}
    engine.close()


def test_what_cannot_be_opened_is_refused() -> None:
    with pytest.raises(BackendError, match="triton, shared, cpu, reference"):
        planning.open_decoder(make_model(), options(), "metal")
    for context in (0, 129):
        with pytest.raises(RequestError, match="context"):
            planning.open_decoder(make_model(), options(context=context))


KINDS_OF_LAYERS = ("qkv", "o", "gate_up", "down", "head")


def room(mib: int = 8 << 10) -> MemoryInfo:
    return MemoryInfo(total_bytes=64 << 30, available_bytes=mib << 20, limit_bytes=None)


def planned(compensation: Compensation | None = None, **options: Any) -> LoadPlan:
    model = StoredModel.open_folder(demo_path(), "demo")
    wanted: dict[str, Any] = {"backend": "reference", "memory": room(), **options}
    memory, measurements = wanted.pop("memory", None), wanted.pop("measurements", None)
    asked = LoadOptions(compensation=compensation or Compensation(k_chunk=0), **wanted)
    return plan_load(model, asked, memory=memory, measurements=measurements)


def test_the_options_are_what_was_asked_for() -> None:
    plan = planned(Compensation(k_chunk={"o": 3}), kv="int8", context=128, num_parallel=5, select="exact")
    options = plan.options
    assert (options.kv, options.context, options.slots, options.select) == ("int8", 128, 5, "exact")
    assert options.pages == plan.memory.pages == 5 * KINDS["int8"].max_pages(128)
    assert options.k_chunk == {**dict.fromkeys(KINDS_OF_LAYERS, 0), "o": 3}
    assert (plan.backend_name, plan.backend.name) == ("reference", "reference")


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_steps_have_the_rows_that_the_backend_takes(name: str) -> None:
    plan = planned(backend=name, kv="int4", num_parallel=1)
    assert (plan.options.max_rows,) == backend(name).step_rows
    assert plan.memory.kv_bytes == cache_bytes(
        KINDS["int4"], plan.model.spec, context=plan.memory.context, slots=plan.memory.slots,
        max_rows=plan.options.max_rows, pages=plan.memory.pages,
    )  # fmt: skip


def test_steps_have_as_many_rows_as_cost_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*choices: int) -> list[LoadPlan]:
        monkeypatch.setattr(backend("cpu"), "step_rows", choices)
        return [planned(backend="cpu", kv="int4", num_parallel=1, memory=room(mib)) for mib in range(260, 280)]

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
        monkeypatch.setattr(planning, "candidates", lambda _asked: iter(chosen))
        return planned(backend="auto")

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

    monkeypatch.setattr(planning, "why_faster", compare)
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
        monkeypatch.setattr(planning, "candidates", lambda _asked: iter(every))
        wanted = LoadOptions(compensation=Compensation(k_chunk=0), context=64, experts_on_device=asked)
        return plan_load(model, wanted, memory=room(main_mib), measurements=tmp_path)

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
    with pytest.raises(BackendError, match="triton, shared, cpu, reference"):
        planned(backend="metal")
    for context in (0, 10**6):
        with pytest.raises(RequestError, match=f"context of {context} tokens"):
            planned(context=context)
    with caplog.at_level(logging.WARNING), pytest.raises(OutOfMemoryError, match="105 MB is free now"):
        planned(backend="auto", memory=room(mib=100))
    assert not caplog.records, "no other backend takes less of main memory, so none is tried"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_a_file_is_rounded_where_a_card_cannot_run_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("Llama", hidden_size=256, intermediate_size=256), kind=kind)
    told: list[str] = []
    assert planning.kept_here(file, told.append) is not None
    card = Candidate(backend=backend("triton"), presence=Presence(usable=True, reason=""), reason="")
    monkeypatch.setattr(planning, "candidates", lambda: iter([card]))
    found = planning.kept_here(file, told.append)
    assert (found is None, len(told)) == ((True, 1) if kind == "Q4_K" else (False, 0))
    assert all("no GPU kernels for weights as they are in Q4_K, so" in words for words in told)
