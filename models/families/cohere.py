"""Cohere: Command R, R7B and Aya Expanse, whose blocks have attention and an MLP side by side.

Both read the stream through one LayerNorm without a bias. Such a norm is an RMSNorm of a stream without a mean, so what
is added to the stream, embeddings among it, is stored less its mean over channels (`Family.centered`). Neighbouring
channels rotate; in Command R7B those of blocks with a window alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.errors import UnsupportedModelError
from models.families.family import NORMS, Family, attention_biases, every, layers_of, listed_windows, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec

_ABSENT = {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
"""What an absent key means."""
_WINDOW, _INTERVAL = 4096, 4


def _read(fields: Fields) -> ModelSpec:
    if fields.flag("use_qk_norm", False):
        raise UnsupportedModelError(
            f"{fields.source}: 'use_qk_norm' is true: LayerNorms of heads are not supported. Choose another model."
        )
    full = fields.with_defaults(_ABSENT)
    return read_spec(full, eps="layer_norm_eps", **attention_biases(full), parallel=True)


def _read_second(fields: Fields) -> ModelSpec:
    layers, window = layers_of(fields), fields.integer("sliding_window", _WINDOW)
    windows = listed_windows(fields, layers, window)
    if windows is None:
        windows = every(fields.integer("sliding_window_pattern", _INTERVAL), layers, window)
    nope_layers = tuple(layer for layer, own in enumerate(windows) if own is None)
    return replace(_read(fields), windows=windows, nope_layers=nope_layers)


def _multipliers(fields: Fields) -> Mapping[str, float]:
    return {"norm": fields.number("logit_scale", 0.0625)}


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    read=_read,
    norms={**NORMS, "post_norm": NORMS["input_norm"]},
    multipliers=_multipliers,
    interleaved=True,
    centered=True,
)
"""Command R and Aya Expanse."""
COHERE2 = replace(COHERE, model_type="cohere2", architecture="Cohere2ForCausalLM", read=_read_second)
"""Command R7B and Command A."""
