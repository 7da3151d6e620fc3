"""gpt-oss: experts with biases and a gate of their own, attention sinks, windows in every other block.

Checkpoints hold the experts' matrices in MXFP4, or as [inputs, outputs]; gate and up alternate in them.
"""

from __future__ import annotations

from models.errors import UnsupportedModelError
from models.families.family import WIDEST, Family, attention_biases, layers_of, listed_windows, read_mixture, read_spec
from models.families.fields import Fields
from models.spec import CLAMPED_GAIN, ModelSpec

HEAD_DIM, WINDOW, THETA, LIMIT = 64, 128, 150000.0, 7.0
"""Width of a head, window, base of the rotary embedding, and limit of gate and up, where config.json doesn't say."""
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary embedding where config.json doesn't say."""


def _read(fields: Fields) -> ModelSpec:
    if fields.table.get("rope_parameters") is None and fields.table.get("rope_scaling") is None:
        fields = fields.with_defaults({"rope_scaling": _YARN})
    fields = fields.with_defaults({"rope_theta": THETA})
    gain, layers = fields.number("swiglu_alpha", CLAMPED_GAIN), layers_of(fields)
    if gain != CLAMPED_GAIN:
        raise UnsupportedModelError(
            f"{fields.source}: 'swiglu_alpha' is {gain:g}, but {CLAMPED_GAIN} alone is supported. Choose another model."
        )
    window = fields.integer("sliding_window", WINDOW)
    windows = listed_windows(fields, layers, window)
    return read_spec(
        fields,
        head_dim=HEAD_DIM,
        activation="clamped_silu",
        windows=windows or tuple(None if layer % 2 else window for layer in range(layers)),
        sinks=True,
        **attention_biases(fields, True),
        gate_limit=fields.number("swiglu_limit", LIMIT),
        mixture=read_mixture(
            fields, width=fields.integer("intermediate_size", most=WIDEST), normalized=True, bias=True
        ),
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    mixture=True,
    routers=("mlp.router",),
    alternating=True,
)
"""gpt-oss of 20 and 120 billion parameters."""
