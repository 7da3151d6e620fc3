"""Predicted memory and speed of models that are not downloaded yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from app.prospects import recommended, words
from models.catalogue import CATALOGUE, KNOWN
from models.hub import is_hub_name
from runtime.load.prospects import Room, prospects, room_of
from runtime.wire.answers import Status
from runtime.wire.device import DeviceReport, Prospect
from tuner.placement import BlockPlacement
from tuner.simulate import card_named

PUBLISHED = {
    "SmolLM2 135M": 134_515_008, "SmolLM2 360M": 361_821_120, "SmolLM2 1.7B": 1_711_376_384,
    "Qwen2.5 0.5B": 494_032_768, "Qwen2.5 1.5B": 1_543_714_304, "Qwen2.5 7B": 7_615_616_512, "Qwen3 0.6B": 596_049_920,
    "Qwen3 1.7B": 1_720_574_976, "Qwen3 4B": 4_022_468_096, "Qwen3 8B": 8_190_735_360, "Llama 3.2 1B": 1_235_814_400,
    "Llama 3.2 3B": 3_212_749_824, "Llama 3.1 8B": 8_030_261_248, "SmolLM3 3B": 3_075_098_624,
    "Gemma 3 1B": 999_885_952, "Gemma 3 4B": 3_880_263_168, "Gemma 4 E2B": 4_628_569_379, "Gemma 4 E4B": 7_463_013_418,
    "Gemma 4 26B-A4B": 25_247_555_870, "Gemma 4 31B": 30_807_445_820, "LFM2 1.2B": 1_170_340_608,
    "Phi-4 mini": 3_836_021_760, "Qwen3 14B": 14_768_307_200, "OLMoE 1B-7B": 6_919_161_856,
    "gpt-oss 20B": 20_914_757_184, "Qwen3 30B-A3B": 30_532_122_624, "Qwen3.5 35B-A3B": 34_660_610_688,
    "Qwen3.5 4B": 4_205_751_296, "Ministral 3 8B": 8_489_553_920, "Qwen3.5 9B": 8_953_803_264,
    "ERNIE 4.5 21B-A3B": 21_825_437_888, "Phi-3.5 mini": 3_821_079_552, "Mistral 7B v0.3": 7_248_023_552,
    "Granite 4 h-350m": 340_332_224, "Granite 4 h-1b": 1_461_538_368, "Granite 4 h-micro": 3_191_396_096,
    "Granite 4 h-tiny": 6_939_037_248, "Falcon-H1 0.5B": 521_411_104, "AFM 4.5B": 4_619_184_640,
    "Command R7B": 8_028_033_024, "Apertus 8B": 8_053_338_176, "LFM2 8B-A1B": 8_339_930_560,
    "Gemma 3n E2B": 4_435_182_688, "Gemma 3n E4B": 6_835_235_568,
    "GLM-4.7-Flash": 29_943_393_920, "Nemotron 3 Nano 30B-A3B": 31_577_940_288, "Laguna XS.2": 33_442_617_088,
}  # fmt: skip
"""Weights as published with each model; of Qwen3.5, Ministral 3, ERNIE, Gemma 3n and 4 and all from Granite 4 on what
their configurations make, for no exact numbers were found: those agree with the rounded ones of their cards."""
GB = 10**9
EMPTY = Status(state="empty")
CARD = "NVIDIA GeForce RTX 4050 Laptop GPU"


def room(free: float, **changes: Any) -> Room:
    values: dict[str, Any] = {
        "backend": "cpu",
        "available_bytes": round(free * GB),
        "main_bytes": round(free * GB),
        "cores": 2,
        "read_gb_s": 45.0,
    }
    return Room(**values | changes)


@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: model.title)
def test_architectures_have_the_weights_that_were_published(model: Any) -> None:
    assert model.spec.parameters == PUBLISHED[model.title]
    assert len(model.good_for.split()) == 3
    assert model.source in KNOWN or is_hub_name(model.source)


def test_what_fits_follows_from_what_is_free() -> None:
    fits = {one.title: one for one in prospects(CATALOGUE, room(5))}
    assert [fits[title].fits for title in ("SmolLM2 135M", "Qwen3 4B", "Phi-3.5 mini", "Qwen3 8B")] == [
        "yes", "yes", "tight", "no",
    ]  # fmt: skip
    tight, none = fits["Phi-3.5 mini"], fits["Qwen3 8B"]
    assert tight.context < 8192
    assert "tokens of context" in words(tight)
    assert none.bits is None
    assert "more than is free now" in words(none)
    assert all(one.fits == "yes" for one in prospects(CATALOGUE, room(64)))
    assert all(one.fits == "no" for one in prospects(CATALOGUE, room(0.2)))


def test_fewer_bits_are_taken_where_more_leave_no_context_to_work_with() -> None:
    phi = next(model for model in CATALOGUE if model.title == "Phi-3.5 mini")
    (found,) = prospects([phi], room(4.3))
    assert (found.fits, found.bits) == ("tight", 3.5)
    assert list(found.sizes) == sorted(set(found.sizes))


def test_speed_agrees_with_what_was_measured() -> None:
    (small,) = prospects(CATALOGUE[:1], room(6))
    assert small.tokens_per_s == pytest.approx(377, rel=0.15)  # docs/speed.md, on a machine that reads about 45 GB/s
    assert prospects(CATALOGUE[:1], room(6, read_gb_s=None))[0].tokens_per_s is None


def test_the_largest_that_is_fast_enough_and_needs_no_login_is_recommended() -> None:
    best = recommended(prospects(CATALOGUE, room(6)))
    assert best is not None
    assert best.title == "Qwen3 1.7B"
    slow = recommended(prospects(CATALOGUE, room(6, read_gb_s=10.0)))
    assert slow is not None
    assert slow.tokens_per_s is not None
    assert slow.tokens_per_s >= 10
    assert slow.parameters < best.parameters
    assert recommended(prospects(CATALOGUE, room(0.2))) is None
    assert recommended(prospects(CATALOGUE, room(6, read_gb_s=None))) is None
    assert recommended([one for one in prospects(CATALOGUE, room(6)) if one.gated]) is None


def machine(**gpu: Any) -> Mapping[str, Any]:
    return {
        "cpu": {"name": "Example", "usable_cores": 8},
        "memory": {"total_bytes": 32 * GB, "available_bytes": 20 * GB},
        "gpu": gpu or None,
        "backend": None,
    }


def test_the_room_is_that_of_the_device_that_would_run_models() -> None:
    plain = room_of(DeviceReport(machine=machine(), bandwidth_gb_s=41.0), EMPTY)
    assert (plain.backend, plain.available_bytes, plain.cores, plain.read_gb_s) == ("cpu", 20 * GB, 8, 41.0)
    held = Status(state="ready", weight_bytes=2 * GB, kv_bytes=GB)
    assert room_of(DeviceReport(machine=machine()), held).available_bytes == 23 * GB
    card = room_of(DeviceReport(machine=machine(name=CARD, vendor="nvidia", memory_free_bytes=5 * GB)), EMPTY)
    assert (card.backend, card.available_bytes, card.main_bytes) == ("triton", 5 * GB, 20 * GB)
    assert card.card is not None
    assert card.card.name == CARD
    driverless = DeviceReport(machine=machine(name=CARD, vendor="nvidia", memory_free_bytes=None))
    assert room_of(driverless, EMPTY).backend == "cpu"


def test_a_shared_model_s_memory_is_free_again_where_it_was() -> None:
    found = {**machine(name=CARD, vendor="nvidia", memory_free_bytes=2 * GB), "backend": "shared"}
    report = DeviceReport(machine=found, blocks=BlockPlacement(on_device=30, held=40))
    shared = room_of(report, Status(state="ready", weight_bytes=3 * GB, kv_bytes=GB))
    assert (shared.backend, shared.available_bytes, shared.main_bytes) == ("triton", 5 * GB, 21 * GB)


def test_a_dense_model_that_a_card_does_not_hold_is_shared_at_the_fewest_bits_that_it_needs() -> None:
    """14B: at 3 bits most blocks are on 6 GB; at 3.5 all of them are on 8 GB."""
    large = [model for model in CATALOGUE if model.title == "Qwen3 14B"]

    def found(card_gb: float, **changes: Any) -> Prospect:
        of = {"main_bytes": 30 * GB, "card": card_named(CARD), "read_gb_s": 60.0, **changes}
        return prospects(large, room(card_gb, **{"backend": "triton", **of}))[0]

    small, whole = found(5.6), found(7.6)
    assert (small.fits, small.bits, small.context) == ("tight", 3, 8192)
    assert small.blocks is not None
    assert 30 < small.blocks.on_device < small.blocks.held == 40
    assert small.tokens_per_s is not None
    assert small.tokens_per_s > 2 * (found(30, backend="cpu", card=None).tokens_per_s or 0)
    assert "of 40 blocks on the card and the others by the processor" in words(small)
    assert (whole.bits, whole.blocks) == (3.5, None)
    assert found(5.6, main_bytes=4 * GB).fits == "no"
    assert found(5.6, read_gb_s=None).tokens_per_s is None


def test_a_card_is_judged_by_its_own_memory_and_cost_model() -> None:
    report = DeviceReport(machine=machine(name=CARD, vendor="nvidia", memory_free_bytes=round(5.6 * GB)))
    found = {one.title: one for one in prospects(CATALOGUE, room_of(report, EMPTY))}
    assert found["Qwen3 1.7B"].fits == "yes"
    assert (found["Qwen3 8B"].fits, found["Qwen3 8B"].bits) == ("yes", 4), "with a cache of 4 bits"
    less = DeviceReport(machine=machine(name=CARD, vendor="nvidia", memory_free_bytes=round(4.8 * GB)))
    assert {one.title: one.fits for one in prospects(CATALOGUE, room_of(less, EMPTY))}["Qwen3 8B"] == "tight"
    assert found["Qwen3 1.7B"].tokens_per_s == pytest.approx(168, rel=0.05)  # of the simulated card


def test_a_mixture_s_experts_stay_in_main_memory_where_a_card_is_too_small() -> None:
    """The speed is that of the card with them, or the processor's, whichever is chosen."""
    mixture = [model for model in CATALOGUE if model.title == "Qwen3 30B-A3B"]

    def found(card_gb: float, main_gb: float, read_gb_s: float | None) -> Prospect:
        small = room(
            card_gb, backend="triton", main_bytes=round(main_gb * GB), card=card_named(CARD), read_gb_s=read_gb_s
        )
        return prospects(mixture, small)[0]

    some = found(5.2, 40, None)
    assert (some.fits, some.bits, some.context) == ("tight", 4, 8192)
    assert some.needed_bytes <= 5.2 * GB
    assert some.tokens_per_s is not None
    more = found(12, 40, None).tokens_per_s
    assert more is not None
    assert found(24, 40, None).fits == "yes"
    assert some.tokens_per_s < more < (found(24, 40, None).tokens_per_s or 0)
    assert found(5.2, 40, 500.0).tokens_per_s > 2 * some.tokens_per_s
    assert found(5.2, 40, 1.0).tokens_per_s == some.tokens_per_s
    assert found(5.2, 8, None).fits == "no", "main memory does not hold the rest"
