"""Models whose keys have statistics, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from models.packed import KeyStatistics
from runtime.backends.decoder import DecoderOptions, Step
from runtime.kv.kinds import KVKind
from runtime.load.plan import open_decoder
from tests.close import Tolerance, assert_close
from tests.runtime.conftest import make_model, make_spec


@pytest.mark.parametrize("kv", ["int4", "gear4"])
def test_a_model_answers_as_the_reference_does(kv: KVKind) -> None:
    """Also with statistics, which change what is stored and not what the model means."""
    logits = {}
    for with_statistics in (True, False):
        model = make_model(make_spec(max_context=512))
        spec, rng = model.spec, np.random.default_rng(4)
        for _ in range(spec.num_layers if with_statistics else 0):
            mean, axis = rng.standard_normal((2, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
            model.keys.append(KeyStatistics(mean, axis / np.linalg.norm(axis, axis=-1, keepdims=True)))
        tokens = np.random.default_rng(5).integers(0, spec.vocab_size, 300).astype(np.int32)
        for backend in ("reference", "cpu"):
            decoder, _ = open_decoder(model, DecoderOptions(kv=kv, context=320, max_rows=60, threads=1), backend)
            for start in range(0, 300, 60):
                found = decoder.forward(Step.of(tokens[start : start + 60], start, [59])).copy()
            decoder.close()
            logits[with_statistics, backend] = found
    for with_statistics in (True, False):
        ours, theirs = (logits[with_statistics, backend] for backend in ("cpu", "reference"))
        assert_close(ours, theirs, Tolerance(span=5e-2, why="integer queries and weights, activations of 8 bits"))
    both = (logits[with_statistics, "reference"] for with_statistics in (True, False))
    assert_close(*both, Tolerance(span=0.3, why="what is rounded to few bits is another"))
