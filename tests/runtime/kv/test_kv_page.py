"""Dequantized pages: error bounds of every kind, and the gain of GEAR's corrections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.backends.operations.pages import (
    dequantize_page,
    low_rank,
    low_rank_product,
    outliers,
    pack_codes,
    quantize_page,
    split,
    unpack_codes,
)
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind, Part, page_fields
from tests.close import assert_close

QUANTIZED: list[KVKind] = [name for name in KINDS if name != "fp16"]
GEAR: list[KVKind] = [name for name in KINDS if name.startswith("gear")]
BACKBONES: dict[str, KVKind] = {"gear4": "kcvt4", "gear-l4": "kcvt4", "gear2": "kivi2", "gear-l2": "kivi2"}


def draw(kind: CacheKind, D: int = 64, *, heads: int = 3, seed: int = 0, outlier: bool = False) -> torch.Tensor:
    """Correlated tokens with channels of different size and offset: [2, heads, page, D]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, kind.page)
    mixed = torch.randn(*shape, 6, generator=generator) @ torch.randn(6, D, generator=generator)
    x = mixed + torch.randn(*shape, D, generator=generator)
    x = x * (0.2 + torch.rand(D, generator=generator)) + 2 * torch.randn(D, generator=generator)
    if outlier:
        x[..., 5] *= 30
    return x


def spread(kind: CacheKind, part: Part, x: torch.Tensor) -> torch.Tensor:
    """(Largest - least) of every number's group, as large as x."""
    code = kind.code(part)
    vectors = x.half().float()
    vectors = vectors.mT if code.axis == "channel" else vectors
    groups = split(vectors, code.group)
    wide = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)).expand_as(groups)
    wide = wide.flatten(-2)[..., : vectors.shape[-1]]
    return wide.mT if code.axis == "channel" else wide


def read(kind: CacheKind, part: Part, x: torch.Tensor, *, draft: bool = False) -> torch.Tensor:
    return dequantize_page(kind, part, quantize_page(kind, part, x), x.shape[-1], draft=draft)


def weighed(x: torch.Tensor, alike: int) -> torch.Tensor:
    """X (I + alike 1 1^T / D)^(1/2)."""
    return x + ((1 + alike) ** 0.5 - 1) * x.mean(-1, keepdim=True)


def error(kind: CacheKind, part: Part, x: torch.Tensor) -> float:
    """Relative to x, root mean square."""
    return float((read(kind, part, x) - x).norm() / x.norm())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("D", [8, 64, 80, 128])
@pytest.mark.parametrize("name", KINDS)
def test_fields_are_as_described(name: KVKind, D: int, part: Part) -> None:
    stored = quantize_page(KINDS[name], part, draw(KINDS[name], D))
    fields = page_fields(KINDS[name], part, D)
    assert list(stored) == [field.name for field in fields]
    for field in fields:
        assert stored[field.name].shape == (2, 3, *field.shape)
        assert str(stored[field.name].dtype) == f"torch.{field.dtype}"
        assert stored[field.name].is_contiguous(), "or what is read of it differs in last bits from what a cache reads"


@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("D", [6, 64, 80])
@pytest.mark.parametrize("name", ["int4", "kcvt4", "kivi2", "hierarchical"])
def test_uniform_codes_are_off_by_half_a_step_at_most(name: KVKind, D: int, part: Part, outlier: bool) -> None:
    kind = KINDS[name]
    x = draw(kind, D, outlier=outlier)
    off = (read(kind, part, x) - x.half().float()).abs()
    wide = spread(kind, part, x)
    if name == "hierarchical":
        drafted = (read(kind, part, x, draft=True) - x.half().float()).abs()
        assert bool((drafted <= 1.001 * wide / 15 / 2 + 1e-6).all())
        assert bool((off <= 1.001 * wide / 15 / 16 + 1e-6).all())
        assert float((off > 1.001 * wide / 15 / 32 + 1e-6).float().mean()) < 0.04  # only errors cut from 8 to 7
    else:
        shifted = 2 if kind.code(part).exact_mean else 1  # by the mean of all errors, each half a step at most
        assert bool((off <= 1.001 * shifted * wide / (2 ** kind.code(part).bits - 1) / 2 + 1e-6).all())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("D", [6, 64, 80])
def test_int4_keeps_the_mean_of_every_token(part: Part, D: int) -> None:
    """Up to the rounding of its zero; codes with the least number as zero would miss it by a share of a step."""
    kind = KINDS["int4"]
    x = draw(kind, D, outlier=True).half().float()
    missed = (read(kind, part, x) - x).mean(-1).abs()
    zero = quantize_page(kind, part, x)["scales"][..., 0, 1].float().abs()
    assert bool((missed <= zero * 2**-11 + 1e-5).all())
    step = spread(kind, part, x)[..., 0] / 15
    assert float(missed.mean()) < 0.02 * float(step.mean())


def test_the_low_rank_of_keys_leaves_least_where_channels_are_alike() -> None:
    """Measured in the metric that counts it more, it is the best of its rank, and misses less of it than the SVD."""
    kind, generator = KINDS["gear-l2"], torch.Generator().manual_seed(9)
    x = torch.rand(5, kind.page, 64, generator=generator) - 0.5
    a, b = low_rank(x, 4, alike=kind.alike("keys"))
    left = x - low_rank_product(a, b)
    best = torch.linalg.svdvals(weighed(x, kind.alike("keys")))[:, 4:].norm()
    assert float(weighed(left, kind.alike("keys")).norm()) <= 1.03 * float(best)
    plain = x - low_rank_product(*low_rank(x, 4))
    assert float(left.mean(-1).norm()) < 0.2 * float(plain.mean(-1).norm())
    assert kind.alike("values") == KINDS["hierarchical"].alike("keys") == 0


@pytest.mark.parametrize("part", PARTS)
def test_int8_is_off_by_little_more_than_half_a_step(part: Part) -> None:
    kind = KINDS["int8"]
    x = draw(kind, outlier=True)
    off = (read(kind, part, x) - x.half().float()).abs()
    # The scale is rounded to half precision, which moves code 255 by 255 * 2^-12 of a step.
    assert bool((off <= 0.563 * spread(kind, part, x) / 255 + 1e-6).all())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [0.0, -3.3, 65504.0, 6e-8])
@pytest.mark.parametrize("name", KINDS)
def test_constant_heads_read_back_as_they_are(name: KVKind, value: float, part: Part) -> None:
    kind = KINDS[name]
    x = torch.full((2, 1, kind.page, 16), value)
    for draft in (False, True):
        back = read(kind, part, x, draft=draft)
        assert bool(torch.isfinite(back).all())
        assert_close(back, x, "stored half")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", KINDS)
def test_the_widest_and_the_smallest_halves_stay_finite(name: KVKind, part: Part) -> None:
    kind = KINDS[name]
    for size in (65504.0, 6e-8, 3e-6):
        x = draw(kind, 16).sign() * size
        off = (read(kind, part, x) - x).abs().max()
        # An outlier as far below the rest as halves reach cannot be corrected in full; a scale below 2^-24 is 0.
        assert float(off) <= (1.01 if kind.sparsity else 0.01) * size + 255 * 2**-25


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 16])
def test_codes_pack_and_unpack(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (5, count), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, -(-count * bits // 8))
    assert torch.equal(unpack_codes(packed, bits, count), codes)
    assert int(packed[0, 0]) & (2**bits - 1) == int(codes[0, 0])


@pytest.mark.parametrize("name", [name for name in QUANTIZED if not KINDS[name].windowed])
def test_tokens_of_such_kinds_do_not_depend_on_their_neighbours(name: KVKind) -> None:
    x = draw(KINDS[name])
    for part in PARTS:
        whole = quantize_page(KINDS[name], part, x)
        for field, array in quantize_page(KINDS[name], part, x[..., 7:8, :]).items():
            assert torch.equal(array, whole[field].narrow(2, 7, 1))


def test_draft_reads_the_upper_plane_alone() -> None:
    kind = KINDS["hierarchical"]
    x = draw(kind)
    for part in PARTS:
        stored = quantize_page(kind, part, x)
        without = {name: array for name, array in stored.items() if name != "lower"}
        assert torch.equal(
            dequantize_page(kind, part, without, 64, draft=True), dequantize_page(kind, part, stored, 64, draft=True)
        )
        upper = replace(KINDS["kcvt4"], name="hierarchical")
        as_int4 = quantize_page(upper, part, x)
        assert torch.equal(stored["upper"], as_int4["codes"])


@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("bits", ["4", "2"])
def test_each_correction_lowers_the_error(bits: str, part: Part, outlier: bool) -> None:
    names: list[KVKind] = ["kcvt4", "gear-l4", "gear4"] if bits == "4" else ["kivi2", "gear-l2", "gear2"]
    x = draw(KINDS["gear4"], outlier=outlier)
    errors = [error(KINDS[name], part, x) for name in names]
    assert errors[0] > 1.02 * errors[1]
    assert errors[1] > 1.02 * errors[2]
    kind = KINDS[names[2]]  # and so do the parts of one page
    stored = quantize_page(kind, part, x)
    left_out = [{"a", "b", "indices", "outliers"}, {"indices", "outliers"}, set()]
    parts = []
    for out in left_out:
        some = {name: array for name, array in stored.items() if name not in out}
        parts.append(float((dequantize_page(kind, part, some, 64) - x).norm()))
    assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize("name", ["gear4", "gear2"])
@pytest.mark.parametrize("part", PARTS)
def test_outliers_read_back_nearly_exactly(name: KVKind, part: Part) -> None:
    kind = KINDS[name]
    x = draw(kind, outlier=True)
    code, stored = kind.code(part), quantize_page(kind, part, x)
    places = stored["indices"].long()
    vectors, back = ((y.mT if code.axis == "channel" else y) for y in (x, read(kind, part, x)))
    assert torch.equal(places[..., 0], vectors.half().argmin(-1))
    assert_close(back.gather(-1, places), vectors.gather(-1, places), "packed attention")


@pytest.mark.parametrize("name", ["gear4", "gear2"])
@pytest.mark.parametrize("part", PARTS)
def test_the_size_of_an_outlier_changes_nothing_but_its_own_correction(name: KVKind, part: Part) -> None:
    x = draw(KINDS[name])
    x[..., 9, 4] = 50
    larger = x.clone()
    larger[..., 9, 4] = 80
    once, again = (quantize_page(KINDS[name], part, y) for y in (x, larger))
    assert all(torch.equal(once[field], again[field]) for field in once if field != "outliers")
    assert not torch.equal(once["outliers"], again["outliers"])


def test_outliers_of_equal_numbers_do_not_count_twice() -> None:
    places = outliers(torch.tensor([[1.0, 1, 1, 1], [3, 0, 0, 3]]), 2)
    assert places.tolist() == [[0, 1, 2, 3], [1, 2, 0, 3]]


@pytest.mark.parametrize("shape", [(128, 64), (128, 8), (128, 4), (128, 128)])
def test_power_iteration_is_nearly_as_good_as_the_svd(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(4)
    flat = torch.rand(6, *shape, generator=generator) - 0.5  # what rounding leaves: hardly any structure
    steep = torch.randn(6, shape[0], 3, generator=generator) @ torch.randn(6, 3, shape[1], generator=generator) + flat
    for x in (flat, steep, torch.zeros_like(flat)):
        a, b = low_rank(x, 4)
        found = (x - low_rank_product(a, b)).norm()
        best = torch.linalg.svdvals(x)[:, 4:].norm()
        assert float(found) <= 1.05 * float(best) + 1e-3 * float(x.norm())
    np.testing.assert_array_equal(a.numpy(), low_rank(x, 4)[0].numpy())


def test_the_low_rank_path_of_attention_is_the_product_taken_apart() -> None:
    kind = KINDS["gear-l2"]
    stored = quantize_page(kind, "keys", draw(kind))
    backbone = {name: array for name, array in stored.items() if name not in ("a", "b")}
    q = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(2))
    whole = q @ dequantize_page(kind, "keys", stored, 64).mT
    apart = q @ dequantize_page(kind, "keys", backbone, 64).mT + (q @ stored["b"].float()) @ stored["a"].float().mT
    assert_close(apart, whole, "half attention")
