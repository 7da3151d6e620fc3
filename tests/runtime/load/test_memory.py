from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.spec import MixtureSpec, ModelSpec, RopeSpec
from runtime.backends import Footprint
from runtime.backends.decoder import KVKind
from runtime.backends.reference.cache import ReferenceCache
from runtime.errors import OutOfMemoryError, RequestError, byte_count
from runtime.kv.kinds import KINDS, bytes_per_token, window_token_bytes
from runtime.load.memory import (
    DEFAULT_CONTEXT,
    MIB,
    SMALLEST_CONTEXT,
    MemoryPlan,
    cache_facts,
    describe,
    layers_within,
    plan,
)
from tuner.detect import MemoryInfo


def spec(max_context: int = 32768, layers: int = 22) -> ModelSpec:
    return ModelSpec(
        family="llama",
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32000,
        max_context=max_context,
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=64),
        windows=(None,) * layers,
    )


WEIGHTS = Footprint(weight_bytes=600 * MIB, residual_bytes=500 * MIB)


def free(mib: int, limit: int | None = None) -> MemoryInfo:
    return MemoryInfo(total_bytes=64 << 30, available_bytes=mib * MIB, limit_bytes=limit)


def planned(mib: int, context: int | None = None, kv: KVKind = "fp16", model: ModelSpec | None = None) -> MemoryPlan:
    return plan(model or spec(), WEIGHTS, kv=kv, context=context, memory=free(mib))


def test_plenty_of_memory_gives_the_default_context_or_what_the_model_has_or_is_asked_for() -> None:
    found = planned(16_000)
    assert found.context == DEFAULT_CONTEXT
    assert found.fits
    assert found.kv_bytes == DEFAULT_CONTEXT * 2 * 22 * 4 * 64 * 2
    assert [planned(16_000, model=spec(max_context=most)).context for most in (500, 40)] == [500, 40]
    assert planned(16_000, context=30_000).context == 30_000


def test_little_memory_gives_the_context_that_fits() -> None:
    found = planned(1000)
    assert SMALLEST_CONTEXT <= found.context < DEFAULT_CONTEXT
    assert found.context % 64 == 0
    assert found.fits
    more = planned(16_000, context=found.context + 64)
    assert more.needed_bytes > found.available_bytes  # the next one would not have fitted


def test_int8_lets_a_longer_context_fit() -> None:
    assert planned(940, kv="int8").context > 1.5 * planned(940).context


def test_a_refusal_tells_what_is_lacking_however_little() -> None:
    needed = planned(16_000, context=4096).needed_bytes
    memory = replace(free(0), available_bytes=needed - 1)
    with pytest.raises(OutOfMemoryError, match=f"needs {byte_count(needed)} .* but 1 kB less is free now"):
        plan(spec(), WEIGHTS, kv="fp16", context=4096, memory=memory)


@pytest.mark.parametrize("context", [0, -1, 32769])
def test_an_impossible_context_is_refused(context: int) -> None:
    with pytest.raises(RequestError, match="32768"):
        planned(16_000, context=context)


def test_the_refusal_has_numbers_and_a_way_out() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        planned(1000, context=32768)
    text = str(caught.value)
    assert "weights 629 MB" in text
    assert "for 32768 tokens" in text
    assert "1.0 GB is free" in text
    assert f"context of {planned(1000).context} tokens fits" in text
    assert "int8 53 %, int4 28 % of fp16's" in text
    assert "\n" not in text


@pytest.mark.parametrize(("kv", "named"), [("int8", "(int4 53 % of"), ("gear4", "(int4 68 % of"), ("kivi2", "")])
def test_advice_names_cheaper_kinds_alone(kv: KVKind, named: str) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        plan(spec(1 << 20), WEIGHTS, kv=kv, context=1 << 20, memory=free(1000))
    assert named in str(caught.value)
    assert ("another kind" in str(caught.value)) == bool(named)


def test_weights_that_do_not_fit_at_all() -> None:
    with pytest.raises(OutOfMemoryError, match="fewer bits or a smaller model") as caught:
        planned(500)
    assert "tokens fits" not in str(caught.value)
    assert f"for {SMALLEST_CONTEXT} tokens" in str(caught.value)


def test_a_container_is_named() -> None:
    with pytest.raises(OutOfMemoryError, match=r"524 MB of this container's 2\.1 GB is free"):
        plan(spec(), WEIGHTS, memory=free(500, limit=2 << 30))


def test_residuals_in_the_weights_memory_are_needed_too() -> None:
    beside = replace(WEIGHTS, residuals_beside=True)
    plain, compensated = (plan(spec(), own, memory=free(16_000)) for own in (WEIGHTS, beside))
    assert compensated.needed_bytes == plain.needed_bytes + 500 * MIB
    assert "(weights 629 MB, residuals 524 MB, cache" in describe(compensated)
    needed = plain.needed_bytes // MIB
    assert plan(spec(), WEIGHTS, context=plain.context, memory=free(needed + 1)).fits
    with pytest.raises(OutOfMemoryError, match="turn off compensation, whose residuals take 524 MB"):
        plan(spec(), beside, context=plain.context, memory=free(needed + 1))


def test_mapped_residuals_are_told_and_not_needed() -> None:
    plain = plan(spec(), replace(WEIGHTS, residual_bytes=0), memory=free(16_000))
    compensated = plan(spec(), WEIGHTS, memory=free(16_000))
    assert compensated.needed_bytes == plain.needed_bytes
    assert (plain.residual_bytes, compensated.residual_bytes) == (0, 500 * MIB)
    assert "in addition residuals 524 MB, mapped" in describe(compensated)
    assert "residuals" not in describe(plain)


def test_what_a_backend_takes_for_itself_is_kept_free_and_slots_multiply_the_cache() -> None:
    own = plan(spec(), replace(WEIGHTS, overhead_bytes=300 * MIB), memory=free(16_000))
    assert own.margin_bytes - plan(spec(), WEIGHTS, memory=free(16_000)).margin_bytes == 300 * MIB
    one, four = (plan(spec(), WEIGHTS, context=1024, slots=slots, memory=free(16_000)) for slots in (1, 4))
    assert four.kv_bytes == 4 * one.kv_bytes


@pytest.mark.parametrize("kv", KINDS)
def test_slots_that_share_pages_add_their_windows_alone(kv: KVKind) -> None:
    kind, per_slot = KINDS[kv], KINDS[kv].window_capacity(128) * window_token_bytes(KINDS[kv], spec())
    one = plan(spec(), WEIGHTS, kv=kv, slots=1, shared=True, memory=free(16_000))
    four = plan(spec(), WEIGHTS, kv=kv, slots=4, shared=True, memory=free(16_000))
    assert (four.slots, four.pages) == (4, kind.max_pages(DEFAULT_CONTEXT))
    assert four.kv_bytes == one.kv_bytes + 3 * per_slot
    two = plan(spec(), WEIGHTS, kv=kv, context=DEFAULT_CONTEXT, slots=4, shared=True, memory=tight(one, per_slot))
    assert (two.slots, two.context) == (2 if per_slot else 4, DEFAULT_CONTEXT)
    with pytest.raises(OutOfMemoryError):
        plan(spec(), WEIGHTS, kv=kv, context=DEFAULT_CONTEXT, slots=4, memory=tight(one, per_slot))


def tight(one: MemoryPlan, more: int) -> MemoryInfo:
    return MemoryInfo(total_bytes=64 << 30, available_bytes=one.needed_bytes + more, limit_bytes=None)


@given(st.integers(0, 40_000), st.integers(1, 200_000), st.sampled_from(["fp16", "int8"]))
def test_a_plan_fits_or_is_refused(mib: int, maximum: int, kv: KVKind) -> None:
    model = spec(max_context=maximum)
    try:
        found = plan(model, WEIGHTS, kv=kv, memory=free(mib))
    except OutOfMemoryError:
        smallest = min(maximum, SMALLEST_CONTEXT)
        roomy = plan(model, WEIGHTS, kv=kv, context=smallest, memory=free(1_000_000))
        assert roomy.needed_bytes > mib * MIB
    else:
        assert found.fits
        assert found.context <= min(maximum, DEFAULT_CONTEXT)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("windows", [(None, None), (32, None, 90)], ids=["whole", "windows"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_cache_is_as_large_as_the_reference_backend_makes_it(
    kv: KVKind, windows: tuple[int | None, ...], shared: bool
) -> None:
    model, sizes = replace(spec(layers=len(windows)), windows=windows), {"context": 3000, "slots": 3}
    planned = plan(model, WEIGHTS, kv=kv, shared=shared, parallel=2, rows=20, memory=free(16_000), **sizes)
    built = ReferenceCache(KINDS[kv], model, max_rows=20, pages=planned.pages, **sizes)
    assert planned.kv_bytes == built.nbytes
    assert len(built.tables) == len(set(windows))


def test_windows_let_a_longer_context_fit() -> None:
    windowed = replace(spec(), windows=(512, 512, 512, None) * 5 + (512, 512))
    assert planned(940, model=windowed).context > 1.5 * planned(940).context
    found = planned(1000, model=windowed)
    for kv, fact in cache_facts(windowed, found).items():
        assert fact.bytes_per_token < bytes_per_token(KINDS[kv], windowed)
        assert planned(1000, context=fact.context, kv=kv, model=windowed).fits


def test_what_every_kind_of_cache_would_mean_agrees_with_the_plan() -> None:
    found = planned(1000)
    facts = cache_facts(spec(), found)
    assert facts.keys() == KINDS.keys()
    for kv, fact in facts.items():
        assert fact.bytes_per_token == bytes_per_token(KINDS[kv], spec())
        assert planned(1000, context=fact.context, kv=kv).fits
        if fact.context < spec().max_context:
            with pytest.raises(OutOfMemoryError):
                planned(1000, context=fact.context + 64, kv=kv)
    assert facts["fp16"].context < facts["int8"].context < spec().max_context
    assert {fact.context for fact in cache_facts(spec(), planned(60_000)).values()} == {spec().max_context}
    assert {fact.context for fact in cache_facts(spec(), replace(found, available_bytes=0)).values()} == {0}


MIXED = replace(spec(), mixture=MixtureSpec(experts=16, chosen=4, width=1024, normalized=True))
EXPERTS = Footprint(weight_bytes=2000 * MIB, residual_bytes=300 * MIB, experts=16, expert_bytes=100 * MIB)
"""Of which all but 400 MiB are experts'."""


def mixed(card_mib: int, main_mib: int = 16_000, asked: int | None = None, context: int | None = None) -> MemoryPlan:
    return plan(
        MIXED, EXPERTS, context=context, memory=free(card_mib), experts_on_device=asked, main=free(main_mib)
    )  # fmt: skip


def test_experts_that_do_not_fit_stay_in_main_memory_before_the_context_is_shortened() -> None:
    whole = mixed(16_000)
    assert (whole.experts_on_device, whole.host_bytes, whole.weight_bytes) == (16, 0, 2000 * MIB)
    some = mixed(2000)
    assert some.context == DEFAULT_CONTEXT
    assert some.fits
    assert 0 < some.experts_on_device < 16
    assert some.host_bytes == (16 - some.experts_on_device) * 100 * MIB
    assert some.weight_bytes + some.host_bytes == whole.weight_bytes
    assert some.needed_bytes + 100 * MIB > some.available_bytes, "one more would not have fitted"
    assert f"{some.experts_on_device} of 16 on the device" in describe(some)
    none = mixed(720)
    assert none.experts_on_device == 0
    assert none.context < DEFAULT_CONTEXT
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        mixed(600)


def test_as_many_experts_as_asked_for_are_on_the_device() -> None:
    assert [mixed(16_000, asked=count).experts_on_device for count in (0, 5, 16)] == [0, 5, 16]
    assert mixed(2000, asked=3).host_bytes == 1300 * MIB
    assert mixed(1020, asked=3).context < DEFAULT_CONTEXT, "and the context gives way"
    with pytest.raises(OutOfMemoryError):
        mixed(2000, asked=16)
    with pytest.raises(RequestError, match=r"17 experts on the device .* a block has 16"):
        mixed(16_000, asked=17)
    with pytest.raises(RequestError, match="the model has no experts"):
        plan(spec(), WEIGHTS, memory=free(16_000), experts_on_device=1)


HALVES = Footprint(
    weight_bytes=2200 * MIB,
    seams=range(1, 22),
    parts=lambda seam: (
        Footprint(weight_bytes=100 * seam * MIB),
        Footprint(weight_bytes=100 * (22 - seam) * MIB, residual_bytes=500 * MIB, residuals_beside=True),
    ),
)


def halves(card_mib: int, main_mib: int = 16_000, asked: int | None = None, context: int | None = None) -> MemoryPlan:
    where = {"memory": free(card_mib), "main": free(main_mib)}
    return plan(spec(), HALVES, context=context, slots=4, shared=True, parallel=4, layers_on_device=asked, **where)


def test_blocks_that_do_not_fit_the_card_are_planned_for_the_processor() -> None:
    found = halves(1500)
    assert found.rest is not None
    assert found.layers_on_device is not None
    assert found.context == found.rest.context == DEFAULT_CONTEXT
    assert found.weight_bytes == found.layers_on_device * 100 * MIB
    assert found.held_bytes == 2200 * MIB + found.kv_bytes + found.rest.kv_bytes
    assert found.fits
    assert found.rest.fits
    with pytest.raises(OutOfMemoryError):
        halves(1500, asked=found.layers_on_device + 1, context=DEFAULT_CONTEXT)
    assert "the processor has blocks from" in describe(found)
    assert halves(3000).layers_on_device == 21
    contexts = [halves(mib).context for mib in range(376, 370, -2)]
    assert contexts == sorted(contexts, reverse=True)
    assert contexts[-1] < DEFAULT_CONTEXT, "too long even for one block"
    with pytest.raises(OutOfMemoryError):
        halves(360)


def test_pages_and_slots_of_both_parts_are_those_that_both_have_room_for() -> None:
    """Either may be the smaller."""
    for card_mib, main_mib in ((1500, 16_000), (16_000, 2300), (16_000, 16_000)):
        found = halves(card_mib, main_mib, asked=8)
        assert found.rest is not None
        assert found.rest.context == found.context
        assert (found.slots, found.contexts) <= (found.rest.slots, found.rest.contexts)
        assert found.pages == found.contexts * KINDS["int4"].max_pages(found.context)
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        halves(16_000, 900, asked=8)


def test_caches_of_a_shared_model_count_in_both_memories() -> None:
    found = halves(1500)
    facts, front = cache_facts(spec(), found), cache_facts(spec(), replace(found, layers_on_device=None, rest=None))
    assert all(fact.bytes_per_token == pytest.approx(front[kv].bytes_per_token) for kv, fact in facts.items())
    assert facts["int4"].context > front["int4"].context, "the card has but some of the blocks"


def test_a_number_of_blocks_for_any_model_is_one_that_this_one_can_have() -> None:
    assert [layers_within(asked, spec()) for asked in (None, 0, 5, 22, 90)] == [None, 0, 5, 22, 22]
    mixers = ("attention",) * 10 + ("shared",) * 12
    assert [layers_within(asked, replace(spec(), mixers=mixers)) for asked in (3, 15)] == [3, 9]


def test_experts_must_fit_main_memory_too() -> None:
    away = mixed(2000).host_bytes // MIB
    assert mixed(2000, main_mib=away + 256).fits, "residuals are loaded as far as they fit"
    with pytest.raises(OutOfMemoryError, match=r"not enough main memory: \d+ of 16 experts"):
        mixed(2000, main_mib=away + 255)
