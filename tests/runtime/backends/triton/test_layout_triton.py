"""The GPU's weight layout: exact round trips, padding, and matrices it can't hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.packed import PackedLinear
from models.packing import pack
from runtime.backends.operations import linear as reference
from runtime.backends.triton import layout, on_card
from runtime.backends.triton.layout import GpuLinear, dequantize, repack, repack_codebook
from runtime.backends.triton.sizes import BLOCK, LANES, code_words
from runtime.errors import BackendError


def _packed(N: int, K: int, bits: int, group_size: int, seed: int = 0) -> PackedLinear:
    rng = np.random.default_rng(seed)
    G = -(-K // group_size)
    return PackedLinear(
        name="layers.3.qkv",
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(rng.integers(0, 1 << bits, (N, K), dtype=np.uint8), bits),
        scales=rng.normal(0, 0.02, (N, G)).astype(np.float16),
        zeros=rng.integers(0, 1 << bits, (N, G), dtype=np.uint8),
        bias=rng.normal(size=N).astype(np.float32),
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


@settings(max_examples=30)
@given(
    N=st.integers(1, 40),
    K=st.integers(1, 1200),
    bits=st.sampled_from([3, 4]),
    group_size=st.sampled_from([32, 64, 96, 128, 256]),
    seed=st.integers(0, 1000),
)
def test_a_matrix_survives_the_layout_exactly(N, K, bits, group_size, seed):
    packed = _packed(N, K, bits, group_size, seed)
    assert torch.equal(dequantize(repack(packed, "cpu")), reference.dequantize(packed))


@settings(max_examples=20)
@given(N=st.integers(1, 40), K=st.integers(1, 1200), bits=st.sampled_from([3, 4]), seed=st.integers(0, 1000))
def test_a_codebook_survives_the_layout_exactly(N, K, bits, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (N, K), dtype=np.uint8)
    book = rng.normal(size=(N, 1 << bits)).astype(np.float16)
    weight = repack_codebook(
        name="w", shape=(N, K), bits=bits, codes=pack(codes, bits), codebook=book, bias=None, device="cpu"
    )
    expected = np.take_along_axis(book.astype(np.float32), codes.astype(np.int64), axis=1)
    assert torch.equal(dequantize(weight), torch.from_numpy(expected))


@pytest.mark.parametrize("bits", [3, 4])
def test_a_stored_codebook_becomes_half_precision_values(packed_codebook_linear, bits):
    """The device's table holds products of a whole number and a half, rounded once."""
    rng = np.random.default_rng(bits)
    packed = packed_codebook_linear(rng.normal(0, 0.02, (20, 600)).astype(np.float32), bits=bits, bias=rng.random(20))
    weight = repack(packed, "cpu")
    assert torch.equal(dequantize(weight), reference.dequantize(packed).half().float())
    np.testing.assert_array_equal(weight.bias.numpy(), packed.bias.astype(np.float32))
    assert (weight.group_size, weight.groups) == (0, None)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_channel_lies_where_the_description_says(bits):
    channel = np.arange(BLOCK)
    piece, inside = channel // 32, channel % 32
    lane = inside % 16 // 4 * 4 + inside // 16 * 2 + inside % 4 // 2
    weight = repack(_packed(1, BLOCK, bits, 128), "cpu")
    words = weight.codes.numpy().view(np.uint32).reshape(bits, LANES)
    each = 16 // bits
    word, bit = np.minimum(piece // each, bits - 1), bits * (piece % each)
    half = words[word, lane] >> (16 * (inside % 2)).astype(np.uint32) & np.uint32(0xFFFF)
    codes = half >> bit.astype(np.uint32) & np.uint32((1 << bits) - 1)
    if bits == 3:
        top = words[:, lane] >> (16 * (inside % 2) + 15).astype(np.uint32) & np.uint32(1)
        codes = np.where(piece == 15, top[0] | top[1] << np.uint32(1) | top[2] << np.uint32(2), codes)
    packed = _packed(1, BLOCK, bits, 128)
    expected = (codes.astype(np.float32) - packed.zeros[0].repeat(128)) * packed.scales[0].astype(np.float32).repeat(
        128
    )
    np.testing.assert_array_equal(reference.dequantize(packed)[0].numpy(), expected)


@pytest.mark.parametrize(("bits", "bits_per_weight"), [(3, 3.25), (4, 4.25)])
def test_bits_per_weight(bits, bits_per_weight):
    weight = repack(dataclasses.replace(_packed(64, 1024, bits, 128), bias=None), "cpu")
    assert weight.nbytes * 8 / (64 * 1024) == bits_per_weight


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("K", [32, 64, 96, 160, 192, 320, 384, 512, 544, 576, 896, 1536, 2560])
def test_what_rows_are_filled_up_by(K, bits):
    """At most 28 bytes an output channel, whatever the width; nothing at multiples of 512 channels."""
    weight = repack(dataclasses.replace(_packed(48, K, bits, 32), bias=None), "cpu")
    filled = weight.codes.nbytes / 48 - K * bits / 8
    assert 0 <= filled <= (0 if K % 512 == 0 else 28), filled
    assert weight.codes.numel() == code_words((48, K), bits)


@pytest.mark.parametrize(("bits", "most"), [(3, 60.4e6), (4, 75.7e6)])
def test_a_model_of_576_channels_takes_little_more_than_its_codes(bits, most):
    """SmolLM2-135M in groups of 64: 58.8 MB at 3 bits without any filling, 90.3 MB in whole blocks."""
    shapes = {(960, 576): 30, (576, 576): 30, (3072, 576): 30, (576, 1536): 30, (49152, 576): 1}
    words = sum(count * (code_words((N, K), bits) + N * K // 64) for (N, K), count in shapes.items())
    assert 4 * words < most


def test_many_rows_are_repacked_in_parts(monkeypatch):
    packed = _packed(70, 600, 3, 64)
    whole = repack(packed, "cpu")
    monkeypatch.setattr("runtime.backends.triton.layout.ROWS_AT_ONCE", 16)
    assert torch.equal(repack(packed, "cpu").codes, whole.codes)


def test_the_bias_goes_along():
    packed = _packed(8, 32, 4, 32)
    weight = repack(packed, "cpu")
    assert isinstance(weight, GpuLinear)
    np.testing.assert_array_equal(weight.bias.numpy(), packed.bias)


def test_groups_that_the_kernels_cannot_cut_are_refused():
    with pytest.raises(BackendError, match=r"layers\.3\.qkv: groups of 48 channels.*multiples of 32"):
        repack(dataclasses.replace(_packed(8, 96, 4, 32), group_size=48), "cpu")


def test_other_bits_are_refused():
    with pytest.raises(BackendError, match="has 8 bits; the GPU computes with 3 and 4"):
        repack(dataclasses.replace(_packed(8, 64, 4, 32), bits=8), "cpu")


def test_codes_of_another_shape_are_refused():
    with pytest.raises(BackendError, match="don't belong to a matrix of 8 by 96"):
        repack(dataclasses.replace(_packed(8, 64, 4, 32), shape=(8, 96)), "cpu")


def test_a_codebook_of_another_size_is_refused():
    with pytest.raises(BackendError, match=r"w: the codebook is \(4, 8\); 4 output channels need 2\^4"):
        repack_codebook(
            name="w",
            shape=(4, 32),
            bits=4,
            codes=np.zeros((4, 4), np.int32),
            codebook=np.zeros((4, 8), np.float16),
            bias=None,
            device="cpu",
        )


def test_a_matrix_beyond_the_kernels_addresses_is_refused(monkeypatch):
    monkeypatch.setattr("runtime.backends.triton.sizes.LANES", 1 << 32)
    with pytest.raises(BackendError, match="more than the kernels can address"):
        repack(_packed(8, 64, 4, 32), "cpu")


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("N", "K"), [(5, 512), (3, 1024), (7, 576), (4, 40), (6, 1500), (9, 1024 + 480)])
def test_a_card_repacks_to_the_same_words(monkeypatch: pytest.MonkeyPatch, bits: int, N: int, K: int) -> None:
    """Whole blocks, whole and short words behind them, and a piece that is not full; two rows at a time."""
    monkeypatch.setattr(on_card, "_VALUES", 2 * -(-K // 32) * 32)
    codes = pack(np.random.default_rng(K).integers(0, 1 << bits, (N, K), dtype=np.uint8), bits)
    codes.setflags(write=False)  # as read from a model's file
    expected = layout._place_codes("x", (N, K), bits, codes, "cpu")
    assert torch.equal(layout.repack_there((N, K), bits, codes, "cpu"), expected)
