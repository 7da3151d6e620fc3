"""Tuning of a loaded model, with scripted clocks."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from assets import demo_path
from models.errors import StoreError
from models.losses import TypeLosses
from models.progress import Progress
from models.spec import MixtureSpec
from models.store import StoredModel
from runtime.backends import Device, backend
from runtime.backends.decoder import DecoderOptions
from runtime.budget import profile_key as keys
from runtime.budget import spending, tuning
from runtime.budget.clocks import Clocks, LayerTimes
from runtime.budget.tuning import NOISE_PERCENT, layers_apart
from runtime.compensation import Compensation, k_chunk_by_type
from runtime.errors import BackendError, Cancelled, RequestError
from runtime.wire.codec import to_json
from tests.runtime.conftest import make_spec
from tuner.errors import TimerError
from tuner.ladder import MOST_READINGS, READINGS, TARGETS
from tuner.profiles import ProfileStore

DEVICE = Device(name="Some Processor", capability="avx2, 4 threads", driver=None)
STEEP = {"qkv": 4.0, "o": 8.0, "gate_up": 1.0, "down": 2.0, "head": 1.0}
"""By how many ten thousandths a layer type slows down for each channel per 1024."""


@dataclass
class FakeDecoder:
    spec: Any
    options: DecoderOptions = field(default_factory=lambda: DecoderOptions(context=64, k_chunk=3))
    backend: str = "cpu"

    def set_prompt_k_chunk(self, _k_chunk: int) -> None:
        """Prompts are no matter here."""

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        self.options = dataclasses.replace(self.options, k_chunk=k_chunk, n_tb=dict(n_tb or {}))


@pytest.mark.parametrize(("blocks", "read"), [(4, 0), (12, 0), (4, 3)])
def test_the_last_mlp_stands_apart_from_the_others(blocks: int, read: int) -> None:
    """Of a mixture, all the experts of a token."""
    mixture = MixtureSpec(experts=8, chosen=read, width=32, normalized=True) if read else None
    decoder: Any = FakeDecoder(make_spec(num_layers=blocks, windows=(None,) * blocks, mixture=mixture))
    whole, each = tuning.layers_of(decoder), max(1, read)
    found = {layer.kind: layer for layer in layers_apart(decoder)}
    assert list(found)[:5] == [layer.kind for layer in whole]
    assert list(found)[5:] == [f"layers.{blocks - 1}.gate_up", f"layers.{blocks - 1}.down"]
    for layer in whole:
        apart = found.get(f"layers.{blocks - 1}.{layer.kind}")
        assert found[layer.kind].count == layer.count - (each if apart else 0)
        assert apart is None or (apart.n, apart.k, apart.count) == (layer.n, layer.k, each)


def test_a_model_of_few_blocks_has_types_alone() -> None:
    decoder: Any = FakeDecoder(make_spec(num_layers=3, windows=(None,) * 3))
    assert layers_apart(decoder) == tuning.layers_of(decoder)


@dataclass
class Lab:
    """A loaded model, its clocks, and what they were asked."""

    model: StoredModel
    decoder: FakeDecoder
    profiles: ProfileStore
    points: list[tuple[str, int]] = field(default_factory=list)
    decodings: list[dict[str, int]] = field(default_factory=list)
    pace: float = 1.0
    factor: float = 1.0
    fail_after: int = 10**9
    failure: Exception = field(default_factory=lambda: TimerError("the clock stopped; start it again"))
    measured: bool = True
    reader: Callable[[Mapping[str, int]], float] = lambda _: 0.0
    read: list[dict[str, int]] = field(default_factory=list)

    def loss(self, k_chunk: Mapping[str, int]) -> float:
        self.read.append(dict(k_chunk))
        return self.reader(k_chunk)

    def seconds(self, kind: str, _n_tb: int, k_chunk: int) -> float:
        if len(self.points) >= self.fail_after:
            raise self.failure
        self.points.append((kind, k_chunk))
        self.decoder.set_k_chunk({kind: k_chunk})  # a clock may, while it runs
        return 1e-3 * self.pace * (1 + STEEP[kind] * k_chunk / 1e4)

    def slowdown(self, k_chunk: Mapping[str, int], _n_tb: Mapping[str, int]) -> float:
        self.decodings.append(dict(k_chunk))
        blocks = self.model.spec.num_layers
        own = sum(key.startswith("layers.") for key in k_chunk)  # of the last block, counted one by one
        spent = sum(
            (1 if key == "head" or key.startswith("layers.") else blocks - (own and key in ("gate_up", "down")))
            * STEEP[key.rsplit(".", 1)[-1]]
            * count
            / 1e4
            for key, count in k_chunk.items()
        )
        return self.factor * 100 * spent / (4 * blocks + 1)

    def tune(self, budget: float = 5.0, **options: Any) -> tuning.Tuning:
        return tuning.tune(self.decoder, self.model, budget_percent=budget, profiles=self.profiles, **options)

    def within(self, budget: float = 5.0) -> tuple[tuning.Tuning | None, tuning.Problem | None]:
        found = spending.spend(
            lambda *_: contextlib.nullcontext(self.decoder),
            self.model,
            Compensation(budget_percent=budget, prompt_budget_percent=0),
            drafts=True,
            profiles=self.profiles,
        )
        return found.tuning, next(iter(found.problems), None)

    def refine(
        self, budget: float = 5.0, loss: Callable[[Mapping[str, int]], float] | None = None, **options: Any
    ) -> tuning.Tuning:
        """Refine on a text that loses less the more is compensated, unless it loses what is said."""
        self.reader = loss or (lambda k_chunk: 1.0 - sum(k_chunk.values()) / 1e4)
        return tuning.refine(
            self.decoder,
            self.model,
            self.tune(budget),
            profiles=self.profiles,
            text="x",
            encode=lambda _: [1],
            **options,
        )


@dataclass
class Told:
    """A model that says it loses what a test wants."""

    model: Any
    losses: TypeLosses | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@dataclass
class Noisy:
    """A timer with a script."""

    seconds: Callable[[str, int, int], float]
    measured: bool


def device_is(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    for name in ("cpu", "triton"):
        monkeypatch.setattr(backend(name), "device", lambda _options: device)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    model = StoredModel.open_folder(demo_path(), "demo")
    lab = Lab(model, FakeDecoder(model.spec), ProfileStore(tmp_path / "profiles"))
    device_is(monkeypatch, DEVICE)
    monkeypatch.setattr(tuning, "clocks", lambda _decoder, _cancelled: Clocks(layers=lab, slowdown=lab.slowdown))
    monkeypatch.setattr(tuning, "TextLoss", lambda *_: lab.loss)
    return lab


def test_what_is_found_is_applied_and_kept(lab: Lab) -> None:
    found = lab.tune(10)
    assert found.budget_percent == 10
    assert 0 < found.measured_slowdown_percent <= 10
    assert any(found.k_chunk.values())
    assert lab.decoder.options.k_chunk == found.k_chunk
    assert (found.n_tb_max, found.cached, found.source) == (None, False, "measured")
    assert lab.slowdown(found.k_chunk, {}) == found.measured_slowdown_percent
    taken = len(lab.points)
    lab.decoder.set_k_chunk(0)
    again = lab.tune(10)
    assert again == dataclasses.replace(found, cached=True)
    assert len(lab.points) == taken
    assert lab.decoder.options.k_chunk == found.k_chunk


def test_it_buys_what_the_model_says_it_loses(lab: Lab) -> None:
    """`down` is made to lose most, and is bought before cheaper layers; without losses, times alone decide."""
    losses = lab.model.losses
    assert losses is not None
    found = lab.tune(3)
    assert found.loss_without == pytest.approx(sum(nats[0] for nats in losses.nats.values()))
    assert found.predicted_loss_won is not None
    assert 0 < found.predicted_loss_won < found.loss_without
    telling = TypeLosses(
        k_chunk=(0, 512), nats={kind: (1.0 if kind == "down" else 1e-6, 0.0) for kind in STEEP}, tokens=8
    )
    lab.model = Told(lab.model, telling)
    bought = lab.tune(3, force=True)
    assert bought.k_chunk["layers.3.down"] > 0 == sum(bought.k_chunk[kind] for kind in ("qkv", "o"))
    lab.model = Told(lab.model, None)
    by_time = lab.tune(3, force=True)
    assert (by_time.predicted_loss_won, by_time.loss_without) == (None, None)
    assert min(by_time.k_chunk.values()) > 0


def test_damaged_losses_leave_the_model_without_compensation(lab: Lab, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_path(), tmp_path / "copy"))
    lab.model = StoredModel.open_folder(folder, "demo")
    (folder / "losses.json").write_text("3")
    found, problem = lab.within(5)
    assert found is None
    assert problem is not None
    assert "losses.json is damaged" in problem.what


def test_it_tells_what_other_slowdowns_would_buy_and_what_was_offered(lab: Lab) -> None:
    found = lab.tune()
    assert found.offer is None
    assert found.bought[0] == (0.0, 0.0)
    assert found.measured_slowdown_percent < found.bought[-1][0] <= found.budget_percent
    refined = lab.refine()
    assert len(refined.bought) > len(found.bought)
    assert list(refined.bought) == sorted(refined.bought)


def test_a_larger_budget_pays_for_more(lab: Lab) -> None:
    sums = [sum(lab.tune(budget).k_chunk.values()) for budget in (2.5, 5, 10, 20)]
    assert sums == sorted(set(sums))


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_the_promise_is_of_whole_steps(lab: Lab, factor: float) -> None:
    """Where layers alone promise too much, a smaller setting is taken; where too little, the rest is spent."""
    lab.factor = factor
    found = lab.tune(10)
    assert 5 < found.measured_slowdown_percent <= 10
    assert found.predicted_slowdown_percent == pytest.approx(found.measured_slowdown_percent / factor)
    assert lab.decodings[0] != found.k_chunk


def test_a_reading_may_scatter_but_the_budget_is_kept(lab: Lab) -> None:
    """The median of the readings and twice its uncertainty is within the budget, so a setting for 4 % is no longer."""
    assert lab.tune(5).measured_slowdown_percent > 3.9
    noise = iter([0.0, 1.5, -1.5] * 100)
    quiet, lab.slowdown = lab.slowdown, lambda k, n: quiet(k, n) + next(noise)  # type: ignore[method-assign]
    found = lab.tune(5, force=True)
    assert 0 < found.measured_slowdown_percent < 3.5


def test_what_is_just_too_slow_leaves_room_for_less(lab: Lab) -> None:
    """The setting for 16 % takes 19.9 and is held to more than 20; half of that is not all that fits."""
    lab.factor = 19.9 / 16
    assert 16 < lab.tune(20).measured_slowdown_percent < 19
    assert any(19.7 < lab.slowdown(k_chunk, {}) < 20 for k_chunk in lab.decodings[:])


def test_where_three_readings_say_nothing_more_are_taken(lab: Lab) -> None:
    noise = iter([0.0, 6.0, -6.0] * 100)
    quiet, lab.slowdown = lab.slowdown, lambda k, n: quiet(k, n) + next(noise)  # type: ignore[method-assign]
    found = lab.tune(10)
    assert 0 < found.measured_slowdown_percent < 5
    assert READINGS < sum(k_chunk == found.k_chunk for k_chunk in lab.decodings) <= MOST_READINGS


def test_few_settings_serve_every_budget(lab: Lab) -> None:
    """A first tuning takes some readings; further budgets, and what was refined, use those that are there."""
    lab.tune(5)
    assert len(lab.decodings) <= 3 * READINGS
    for budget in (2.5, 5, 10, 20):
        lab.refine(budget)
    settings = {tuple(k_chunk.items()) for k_chunk in lab.decodings}
    assert len(settings) <= len(TARGETS) + 4
    before = len(lab.decodings)
    for budget in (2.5, 5, 10, 20):
        assert lab.tune(budget).refined
        lab.refine(budget)
    assert len(lab.decodings) == before


def test_refining_reads_a_text_and_takes_what_loses_least(lab: Lab) -> None:
    first = lab.tune(5)
    refined = lab.refine(5)
    assert (first.refined, refined.refined) == (False, True)
    assert {} in ({kind: k for kind, k in read.items() if k} for read in lab.read), "without compensation"
    assert refined.loss_without == 1.0
    assert refined.predicted_loss_won == pytest.approx(sum(refined.k_chunk.values()) / 1e4)
    assert refined.k_chunk == lab.decoder.options.k_chunk
    assert refined.measured_slowdown_percent <= 5
    assert lab.tune(5) == refined == lab.refine(5), "whoever loads it gets the same"
    near = [k_chunk for k_chunk in lab.decodings if k_chunk == refined.k_chunk]
    assert len(near) == MOST_READINGS
    lab.decoder.options = dataclasses.replace(lab.decoder.options, prompt_k_chunk=1024)
    none = lab.refine(5, lambda k_chunk: 1.0 + sum(k_chunk.values()))
    assert set(none.k_chunk.values()) == {0}, "prompts are read in another way, and then nothing pays"
    assert (none.measured_slowdown_percent, none.refined) == (0, True)


@pytest.mark.parametrize("steps", [0, 4, 20])
def test_a_stopped_refinement_leaves_the_decoder_as_it_was_and_goes_on(lab: Lab, steps: int) -> None:
    tuned = lab.tune(5)
    start = len(lab.decodings)
    with pytest.raises(Cancelled):
        lab.refine(5, cancelled=lambda: len(lab.decodings) >= start + steps)
    assert lab.decoder.options.k_chunk == tuned.k_chunk
    assert not lab.tune(5).refined
    lab.refine(5)
    whole = len(lab.decodings)
    lab.tune(5, force=True)
    lab.refine(5)
    assert whole == len(lab.decodings) - whole, "no reading was taken twice"


def test_another_budget_reuses_the_timings(lab: Lab) -> None:
    lab.tune(5)
    before = set(lab.points)
    lab.points.clear()
    lab.tune(6)
    assert not {point for point in lab.points if point[1]} & before


def test_force_measures_everything_again(lab: Lab) -> None:
    lab.tune(5)
    before = set(lab.points)
    lab.points.clear()
    assert not lab.tune(5, force=True).cached
    assert set(lab.points) == before


def test_a_stopped_tuning_goes_on_where_it_was(lab: Lab) -> None:
    with pytest.raises(Cancelled):
        lab.tune(5, cancelled=lambda: len(lab.points) >= 12)
    assert lab.decoder.options.k_chunk == 3, "it must stay as it was"
    done, lab.points = set(lab.points), []
    found = lab.tune(5)
    assert not found.cached
    assert not {point for point in lab.points if point[1]} & done
    fresh = lab.tune(5, force=True)
    assert fresh.k_chunk == found.k_chunk


def test_a_clock_that_drifts_between_two_tunings_does_no_harm(lab: Lab) -> None:
    with pytest.raises(Cancelled):
        lab.tune(5, cancelled=lambda: len(lab.points) >= 12)
    lab.pace = 3.0
    resumed = lab.tune(5)
    assert resumed.k_chunk == lab.tune(5, force=True).k_chunk


@pytest.mark.parametrize("change", ["budget", "device", "driver", "content", "recipe", "version", "backend"])
def test_a_profile_is_good_for_nothing_else(
    lab: Lab, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab.tune(5)
    device = DEVICE
    if change == "device":
        device = dataclasses.replace(DEVICE, capability="avx2, 2 threads")
    elif change == "driver":
        device = dataclasses.replace(DEVICE, driver="1.2")
    elif change == "content":
        shutil.copytree(demo_path(), tmp_path / "demo")
        (tmp_path / "demo" / "manifest.json").write_text("{}")
        lab.model.path = tmp_path / "demo"
    elif change == "recipe":
        lab.model.recipe = dataclasses.replace(lab.model.recipe, residual_bits=2)
    elif change == "version":
        monkeypatch.setattr(keys, "versions", lambda: {"lowbit-chat": "99"})
    elif change == "backend":
        lab.decoder.backend = "triton"
    device_is(monkeypatch, device)
    assert lab.tune(5).cached is False if change != "budget" else not lab.tune(5.5).cached


def test_a_budget_of_nothing_needs_no_clock(lab: Lab) -> None:
    found = lab.tune(0)
    assert (found.budget_percent, found.measured_slowdown_percent, found.k_chunk) == (0, 0, k_chunk_by_type(0))
    assert lab.decoder.options.k_chunk == 0
    assert not lab.points


@pytest.mark.parametrize("budget", [-1, 100.5, float("nan"), float("inf")])
def test_a_budget_that_makes_no_sense(lab: Lab, budget: float) -> None:
    with pytest.raises(RequestError, match="from 0 to 100"):
        lab.tune(budget)


@pytest.mark.parametrize(
    ("obstacle", "said"), [("residuals", "without residuals"), ("backend", "reference"), ("context", "too short")]
)
def test_where_a_budget_has_no_effect(lab: Lab, obstacle: str, said: str) -> None:
    if obstacle == "residuals":
        lab.model.recipe = dataclasses.replace(lab.model.recipe, residual_bits=0)
    elif obstacle == "backend":
        lab.decoder.backend = "reference"
    else:
        lab.decoder.options = DecoderOptions(context=8)
    with pytest.raises(tuning.NoTuningError, match=said):
        lab.tune(5)
    found, problem = lab.within(5)
    assert found is None
    assert problem is not None
    assert said in problem.what
    assert not problem.failure
    assert lab.decoder.options.k_chunk == 0
    assert lab.within(0)[1] is None, "no compensation needs nothing"


def test_a_load_survives_a_tuning_that_fails(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.fail_after = 7
    with pytest.raises(TimerError):
        lab.tune(5)
    assert lab.decoder.options.k_chunk == 3
    found, problem = lab.within(5)
    assert found is None
    assert problem is not None
    assert problem.failure
    assert "the clock stopped" in problem.what
    assert "tune-device" in problem.fix
    assert lab.decoder.options.k_chunk == 0
    assert "without error compensation" in caplog.text


def test_a_card_that_vanishes(lab: Lab) -> None:
    lab.fail_after, lab.failure = 7, RuntimeError("CUDA error: unspecified launch failure\nmore")
    with pytest.raises(BackendError, match=r"Some Processor.*unspecified launch failure.*still there"):
        lab.tune(5)


def test_a_folder_that_cannot_be_written_costs_tuning_again(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.profiles.folder.write_text("a file")
    found, problem = lab.within(5)
    assert problem is None
    assert found is not None
    assert lab.decoder.options.k_chunk == found.k_chunk
    assert "again next time" in caplog.text


def test_what_cannot_be_true_is_not_kept(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.factor = -3.0
    assert lab.tune(10).measured_slowdown_percent < -2
    assert "busy" in caplog.text
    lab.factor = 1.0
    lab.points.clear()
    assert not lab.tune(10).cached
    assert ("qkv", 4) in lab.points, "the timings of a busy machine are of no use either"
    assert lab.tune(10).cached


def test_a_model_whose_manifest_is_gone(lab: Lab, tmp_path: Path) -> None:
    lab.model.path = tmp_path
    with pytest.raises(StoreError, match="manifest"):
        lab.tune(5)


def test_progress_is_told_in_words(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_QUIET_S", 0.0)
    reports: list[Progress] = []
    lab.tune(5, progress=reports.append)
    assert {report.phase for report in reports} == {"tune"}
    assert "tuning demo for Some Processor" in reports[0].message
    assert "5 %" in reports[0].message
    assert "timing qkv" in "\n".join(report.message for report in reports)
    assert "decoding" in reports[-1].message
    assert all(report.total is None or report.done < report.total for report in reports)
    assert [report.done for report in reports] == sorted(report.done for report in reports)


def test_readings_are_told_now_and_then_only(lab: Lab) -> None:
    """Whoever shows a report takes processor time from the reading that it announces."""
    reports: list[Progress] = []
    lab.tune(5, progress=reports.append)
    assert len(lab.points) > 10
    assert sum("timing" in report.message for report in reports) == 0


def test_the_curve_is_what_was_timed(lab: Lab) -> None:
    found = lab.tune(5)
    assert [curve.kind for curve in found.curve] == list(STEEP)
    for curve in found.curve:
        assert curve.points[0] == (0, 1.0)
        assert [k for k, _ in curve.points] == sorted({k for kind, k in lab.points if kind == curve.kind})
        assert all(ratio == pytest.approx(1 + STEEP[curve.kind] * k / 1e4) for k, ratio in curve.points)
    assert to_json(found)["curve"][0]["points"][0] == [0, 1.0]


def test_times_are_relative_to_one_plain_time(lab: Lab) -> None:
    told: list[tuple[str, int]] = []
    times = LayerTimes(lab, [("o", 0, 0, 2e-3), ("o", 0, 8, 1.5)], lambda kind, k_chunk: told.append((kind, k_chunk)))
    assert [times.seconds("qkv", 0, 100) for _ in range(3)] == pytest.approx([1.04e-3] * 3)
    assert times.seconds("qkv", 0, 0) == pytest.approx(1e-3)
    assert times.seconds("o", 0, 8) == pytest.approx(3e-3)
    assert times.seconds("o", 0, 100) == pytest.approx(2e-3 * 1.08), "today's ratio times the plain time that is kept"
    assert told == [("qkv", 100), ("o", 100)]
    assert {point[:3]: point[3] for point in times.times}["qkv", 0, 100] == pytest.approx(1.04)


def test_a_point_is_the_median_of_its_readings(lab: Lab) -> None:
    """One reading beside another program moves nothing, be it too long or too short; simulated times are read once."""
    noisy = iter([1.04, 9.0, 1.05, 0.1, 1.1, 1.2])

    def seconds(_kind: str, _n_tb: int, k_chunk: int) -> float:
        return 1e-3 * next(noisy) if k_chunk else 1e-3

    for measured, found in ((True, (1.05, 1.1)), (False, (9.0,))):
        times = LayerTimes(Noisy(seconds, measured), [], lambda _kind, _k_chunk: None)
        if not measured:
            noisy = iter([9.0])
        for k_chunk, ratio in zip((8, 16), found, strict=False):
            assert times.seconds("qkv", 0, k_chunk) == pytest.approx(1e-3 * ratio)


@pytest.fixture
def quick_clocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    from runtime.budget import clocks

    monkeypatch.setattr(clocks, "READING_S", 0.0)
    monkeypatch.setattr(clocks, "DECODING_S", 0.0)
    return lambda: None


def test_this_processor(tmp_path: Path, quick_clocks: Callable[[], None]) -> None:
    from runtime.backends.cpu.decoder import CpuDecoder

    model = StoredModel.open_folder(demo_path(), "demo")
    decoder = CpuDecoder(model, DecoderOptions(context=32, threads=1))
    profiles = ProfileStore(tmp_path)
    found = tuning.tune(decoder, model, budget_percent=60, profiles=profiles)
    assert found.measured_slowdown_percent <= 60
    assert decoder.options.k_chunk == found.k_chunk
    assert "1 thread" in found.device
    kept = found.measured_slowdown_percent >= -NOISE_PERCENT  # not on a machine that is kept busy by something else
    assert tuning.tune(decoder, model, budget_percent=60, profiles=profiles).cached == kept
    decoder.close()
