"""The GPU's weight layout: exact round trips, padding, and matrices it can't hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.backends.operations import linear as reference
from runtime.backends.triton import layout
from runtime.backends.triton.layout import repack
from runtime.backends.triton.sizes import code_words
from runtime.errors import BackendError
from tests.runtime.backends.triton.operands import dequantize, packed_matrix
from tests.runtime.conftest import pack_codebook_linear


@settings(max_examples=30)
@given(
    N=st.integers(1, 40),
    K=st.integers(1, 1200),
    bits=st.sampled_from([3, 4]),
    group_size=st.sampled_from([32, 64, 96, 128, 256]),
    seed=st.integers(0, 1000),
)
def test_a_matrix_survives_the_layout_exactly(N, K, bits, group_size, seed):
    packed = packed_matrix(N, K, bits, group_size, seed)
    assert torch.equal(dequantize(repack(packed, "cpu")), reference.dequantize(packed))


@pytest.mark.parametrize("bits", [3, 4])
def test_a_stored_codebook_becomes_half_precision_values(bits):
    """The device's table holds products of a whole number and a half, rounded once."""
    rng = np.random.default_rng(bits)
    packed = pack_codebook_linear(rng.normal(0, 0.02, (20, 600)).astype(np.float32), bits=bits, bias=rng.random(20))
    weight = repack(packed, "cpu")
    assert torch.equal(dequantize(weight), reference.dequantize(packed).half().float())
    np.testing.assert_array_equal(weight.bias.numpy(), packed.bias.astype(np.float32))
    assert (weight.group_size, weight.groups) == (0, None)


@pytest.mark.parametrize(("bits", "bits_per_weight"), [(3, 3.25), (4, 4.25)])
def test_bits_per_weight(bits, bits_per_weight):
    weight = repack(packed_matrix(64, 1024, bits, 128), "cpu")
    assert weight.nbytes * 8 / (64 * 1024) == bits_per_weight


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("K", [32, 64, 96, 160, 192, 320, 384, 512, 544, 576, 896, 1536, 2560])
def test_what_rows_are_filled_up_by(K, bits):
    """At most 28 bytes an output channel, whatever the width; nothing at multiples of 512 channels."""
    weight = repack(packed_matrix(48, K, bits, 32), "cpu")
    filled = weight.codes.nbytes / 48 - K * bits / 8
    assert 0 <= filled <= (0 if K % 512 == 0 else 28), filled
    assert weight.codes.numel() == code_words((48, K), bits)


@pytest.mark.parametrize("bits", [3, 4])
def test_many_rows_are_repacked_in_parts(monkeypatch, bits):
    """Two at a time, from memory that nobody may write to, as a model's file is."""
    packed = packed_matrix(7, 600, bits, 64, bias=True)
    packed.codes.setflags(write=False)
    whole = repack(packed, "cpu")
    monkeypatch.setattr(layout, "_VALUES", 2 * 19 * 32)
    assert torch.equal(repack(packed, "cpu").codes, whole.codes)
    np.testing.assert_array_equal(whole.bias.numpy(), packed.bias)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 48}, r"layers\.0\.down: groups of 48 channels.*multiples of 32"),
        ({"bits": 8}, "has 8 bits; the GPU computes with 3 and 4"),
        ({"shape": (8, 128)}, "don't belong to a matrix of 8 by 128"),
        ({"codebook": np.zeros((8, 8), np.int8)}, r"the codebook is \(8, 8\); 8 output channels need 2\^4"),
    ],
)
def test_what_kernels_cannot_read_is_refused(change, message):
    with pytest.raises(BackendError, match=message):
        repack(replace(packed_matrix(8, 96, 4, 32), **change), "cpu")


def test_a_matrix_beyond_the_kernels_addresses_is_refused(monkeypatch):
    monkeypatch.setattr("runtime.backends.triton.sizes.LANES", 1 << 32)
    with pytest.raises(BackendError, match="more than the kernels can address"):
        repack(packed_matrix(8, 64, 4, 32), "cpu")
