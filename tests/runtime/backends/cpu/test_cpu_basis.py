"""Turning queries and keys, compiled, against `runtime.backends.operations.basis`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from models.keys import KeyStatistics
from runtime.backends.cpu.data import instructions as op
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.basis import to_basis
from runtime.kv.basis import key_basis
from runtime.kv.kinds import KVKind
from runtime.load.open import open_decoder
from tests.close import Tolerance, assert_close
from tests.guarded import aligned_zeros


@pytest.mark.parametrize("D", [2, 8, 20, 40, 64, 96, 128])
def test_heads_are_turned_as_the_reference_turns_them(
    attending: Callable[..., Any], machine: Callable[..., Any], D: int
) -> None:
    H, K, M = 6, 3, 4
    rng = np.random.default_rng(D)
    axis = rng.standard_normal((K, D))
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    mean = rng.standard_normal((K, D)).astype(np.float32)
    basis = key_basis(KeyStatistics(mean, axis.astype(np.float32)), K, D)
    cache = attending("int4", heads=H, kv_heads=K, dim=D).cpu
    slots, positions = np.zeros(M, np.int32), np.arange(M, dtype=np.int32)
    cache.begin(slots, positions)
    x = rng.standard_normal((M, H + 2 * K, D)).astype(np.float32)
    qkv = aligned_zeros((M, (H + 2 * K) * D), np.float32)
    qkv[:] = x.reshape(M, -1)
    run = machine(M)
    run.inputs[1][:M], run.inputs[2][:M] = slots, positions
    reflection, own = (int(array.ctypes.data) for array in (basis.reflection, basis.mean))
    rows = op.Matrix(int(qkv.ctypes.data), qkv.strides[0])
    run.run(op.Heads(rows, H, K, D, 0, 0, 0, 0, 0, 0.0, 0.5, cache.stored(1), reflection, own))
    wide = torch.from_numpy(basis.reflection).repeat_interleave(H // K, dim=0)
    q = to_basis(torch.from_numpy(x[:, :H]), wide)
    k = to_basis(torch.from_numpy(x[:, H : H + K]), torch.from_numpy(basis.reflection)) - torch.from_numpy(basis.mean)
    assert_close(qkv.reshape(M, -1, D)[:, :H], 0.5 * q, "float32")
    assert_close(cache.store.window("keys", 0, M)[1].swapaxes(0, 1), k, "stored half")
    np.testing.assert_array_equal(
        cache.store.window("values", 0, M)[1].swapaxes(0, 1), x[:, H + K :].astype(np.float16)
    )


@pytest.mark.parametrize("kv", ["int4", "gear4"])
def test_a_model_answers_as_the_reference_does(
    tiny_model: Callable[..., Any], tiny_spec: Callable[..., Any], kv: KVKind
) -> None:
    """Also with statistics, which change what is stored and not what the model means."""
    logits = {}
    for with_statistics in (True, False):
        model = tiny_model(tiny_spec(max_context=512))
        spec, rng = model.spec, np.random.default_rng(4)
        for _ in range(spec.num_layers if with_statistics else 0):
            mean, axis = rng.standard_normal((2, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
            model.keys.append(KeyStatistics(mean, axis / np.linalg.norm(axis, axis=-1, keepdims=True)))
        tokens = np.random.default_rng(5).integers(0, spec.vocab_size, 300).astype(np.int32)
        for backend in ("reference", "cpu"):
            decoder, _ = open_decoder(model, DecoderOptions(kv=kv, context=320, max_rows=60, threads=1), backend)
            for start in range(0, 300, 60):
                positions = np.arange(start, start + 60, dtype=np.int32)
                found = decoder.forward(
                    Step(
                        tokens=tokens[start : start + 60],
                        slots=np.zeros(60, np.int32),
                        positions=positions,
                        logit_rows=np.array([59], np.int32),
                    )
                ).copy()
            decoder.close()
            logits[with_statistics, backend] = found
    for with_statistics in (True, False):
        ours, theirs = (logits[with_statistics, backend] for backend in ("cpu", "reference"))
        assert_close(ours, theirs, Tolerance(span=5e-2, why="integer queries and weights, activations of 8 bits"))
    both = (logits[with_statistics, "reference"] for with_statistics in (True, False))
    assert_close(*both, Tolerance(span=0.3, why="what is rounded to few bits is another"))
