"""Expected speeds of mixtures whose experts are in two places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from models.catalogue import CATALOGUE
from models.spec import MixtureSpec
from models.store import StoredModel
from runtime.load import expected
from runtime.load.expected import missed_share, on_both, on_card, on_processor, why_faster
from runtime.load.memory import MemoryPlan
from tuner import bandwidth
from tuner.bandwidth import ReadBandwidth
from tuner.devices import DEVICES

SPEC = next(model.spec for model in CATALOGUE if model.title == "Qwen3 30B-A3B")
CARD = DEVICES["rtx-4050m"]
ACTIVE = 1_700_000_000


def test_shared_experts_are_on_the_device_first() -> None:
    mixture = MixtureSpec(experts=8, chosen=2, width=8, normalized=True, shared=2)
    shares = {0: 1.0, 1: 0.75, 2: 0.5, 4: 0.5 * 0.75 * 0.59, 10: 0.0}
    assert {count: missed_share(mixture, count) for count in shares} == pytest.approx(shares)


def test_experts_that_were_used_last_are_found_as_often_as_in_public_traces() -> None:
    """Of 512 experts, of which a token goes to 10, 64 and 128; of 128, where it goes to 8, those of one token."""
    for (experts, chosen), found in {(512, 10): {64: 0.67, 128: 0.81}, (128, 8): {8: 0.45}}.items():
        mixture = MixtureSpec(experts=experts, chosen=chosen, width=8, normalized=True)
        assert {own: 1 - missed_share(mixture, own) for own in found} == pytest.approx(found, abs=0.01)


def test_what_is_missed_is_read_at_the_speed_of_the_link() -> None:
    """Each token reads 8 experts of 4.7 million weights in 48 blocks, of 4.25 bits."""
    expert_bytes = 48 * 8 * 3 * 2048 * 768 * 4.25 / 8
    whole, none = on_card(SPEC, 4, CARD), on_card(SPEC, 4, CARD, missed=1.0, link_gb_s=10.0)
    assert on_card(SPEC, 4, CARD, missed=0.0, link_gb_s=1.0) == whole
    dense = 1 / none - expert_bytes / 10e9
    assert 0 < dense < 1 / whole
    half = 1 / on_card(SPEC, 4, CARD, missed=0.5, link_gb_s=10.0)
    assert half == pytest.approx((1 / whole + 1 / none) / 2)


SUMMARY = SimpleNamespace(active_bytes=ACTIVE, gpu_bytes=17_000_000_000)
MODEL = cast(
    "StoredModel",
    SimpleNamespace(spec=SPEC, recipe=SimpleNamespace(bits=4.0), info=SimpleNamespace(summary=SUMMARY)),
)
"""Of which only sizes are known."""


def _plan(here: int) -> MemoryPlan:
    sizes = dict.fromkeys(
        ("context", "slots", "contexts", "weight_bytes", "residual_bytes", "kv_bytes", "buffer_bytes", "margin_bytes"),
        1,
    )
    away = (128 - here) * 127_000_000
    return MemoryPlan(
        **sizes, pages=None, residuals_beside=False, available_bytes=1, experts=128, experts_on_device=here,
        host_bytes=away,
    )  # fmt: skip


def _why(planned: MemoryPlan, card: str, link: float | None, measurements: Path | None) -> str | None:
    """Compared with the processor alone."""
    return why_faster(MODEL, planned, _plan(128), "the processor", card, link, measurements)


@pytest.mark.parametrize("card", [CARD.name, "a card without a data sheet"])
def test_the_processor_is_taken_where_it_reads_faster_than_the_link(monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    """With 32 of 128 experts on the card a third is missed, with 125 next to none."""
    speeds = {"slow": 5.0, "fast": 100.0}
    for name, gb_s in speeds.items():
        monkeypatch.setattr(expected, "read_bandwidth", lambda _, own=gb_s: SimpleNamespace(gb_s=own))
        reasons = [_why(_plan(here), card, 12.0, None) for here in (32, 125)]
        assert [reason is not None for reason in reasons] == [name == "fast", False]
        if reasons[0] is not None:
            speed = on_processor(SPEC, ACTIVE, gb_s)
            assert reasons[0].startswith(f"32 of 128 experts of each block fit {card}")
            assert reasons[0].endswith(f"{speed:.0f} of the processor")


def test_nothing_is_compared_where_all_experts_fit_or_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "read_bandwidth", lambda _: pytest.fail("measured for nothing"))
    assert _why(replace(_plan(128), host_bytes=0), CARD.name, 12.0, None) is None
    assert _why(_plan(32), "a card without a data sheet", None, None) is None


def test_the_memory_is_measured_once_for_all_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [ReadBandwidth(gb_s=100.0, threads=1, buffer_bytes=1, boot="this one")]
    monkeypatch.setattr(bandwidth, "boot_id", lambda: "this one")
    monkeypatch.setattr(bandwidth, "measure", lambda *_: found.pop())
    reasons = [_why(_plan(32), CARD.name, 12.0, tmp_path) for _ in range(2)]
    assert reasons[0] == reasons[1] is not None


def test_a_card_and_a_processor_take_their_times_one_after_the_other() -> None:
    """Also a mixture's blocks may be shared, where that is faster than the link."""
    card, alone = on_card(SPEC, 4, CARD), on_processor(SPEC, ACTIVE, 60.0)
    shared = [on_both(SPEC, 4, CARD, seam, ACTIVE, 60.0) for seam in (1, 24, 47)]
    assert alone < shared[0] < shared[1] < shared[2] < card
    assert 1 / shared[1] == pytest.approx((1 / card + 1 / alone) / 2, rel=0.15), "but the head is the processor's"
    assert on_both(SPEC, 4, None, 24, ACTIVE, 60.0) == pytest.approx(2 * alone, rel=0.15)
