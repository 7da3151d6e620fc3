"""EXAONE 4: norms behind attention and MLP, none before them; where some blocks have a window, only those rotate."""

from __future__ import annotations

from models.families.family import NORMS_AFTER, Family, every, layers_of, listed_windows, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec

INTERVAL = 4
"""Every so many blocks one has no window, where config.json doesn't say."""


def _read(fields: Fields) -> ModelSpec:
    layers, window = layers_of(fields), fields.optional_integer("sliding_window")
    windows = listed_windows(fields, layers, window)
    if windows is None:
        windows = every(_interval(fields), layers, window)
    return read_spec(
        fields,
        windows=windows,
        nope_layers=() if window is None else tuple(at for at, own in enumerate(windows) if own is None),
        norm_before=False,
        norm_after=True,
        qk_norm=True,
    )


def _interval(fields: Fields) -> int:
    """`sliding_window_pattern` is a number, or a word like LLLG of so many letters."""
    pattern = fields.table.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    return fields.integer("sliding_window_pattern", INTERVAL)


EXAONE4 = Family(model_type="exaone4", architecture="Exaone4ForCausalLM", read=_read, norms=NORMS_AFTER)
"""EXAONE 4.0 of 1.2 and 32 billion parameters."""
