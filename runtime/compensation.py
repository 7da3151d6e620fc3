"""Compensation settings: a fixed `k_chunk`, or a slowdown budget from which the tuner derives one.

Prompts have a separate budget, for the time to the first token: their rows share the residuals that are read, so it
buys far more than the same share of a decoded token's time.

Cheap to import, for the command line and the terminal UI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from runtime.errors import RequestError

CHUNK = 1024
"""Input channels of one local search, the unit of `k_chunk`; the last chunk of a matrix may be narrower."""
LARGEST_BUDGET_PERCENT = 100
"""A slowdown of 100 % doubles the time of a token."""
DEFAULT_BUDGET_PERCENT = 5.0
"""Default slowdown budget of decoding."""
DEFAULT_PROMPT_BUDGET_PERCENT = 20.0
"""Default slowdown budget of prompts, if decoding is compensated."""
Exact = Literal["exact"]
EXACT: Exact = "exact"
"""The budget of exact answers: those of the source's own weights, whatever they cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensation:
    """A fixed k_chunk, a slowdown budget, or exact answers; with none of them, the default budget.

    Raises:
        RequestError: several are given, or a value is out of range.
    """

    k_chunk: Mapping[str, int] | int | None = None
    """Salient channels per 1024 input channels: one number, or one by layer type (`k_chunk_of`); 0 is none."""
    budget_percent: float | None = None
    """Slowdown of decoding that compensation may cause, in [0, 100]; 0 is no compensation."""
    prompt_budget_percent: float | None = None
    """Slowdown of prompts that compensation may cause, in [0, 100]; None: see `prompt_percent`."""
    exact: bool = False
    """Whether the source's own weights answer, so that nothing is compensated."""
    or_usual: bool = False
    """Whether the default budget does instead where they can't; else that is an error."""

    def __post_init__(self) -> None:
        if self.exact:
            if any(own is not None for own in (self.k_chunk, self.budget_percent, self.prompt_budget_percent)):
                raise RequestError("exact answers are not compensated: leave out k_chunk and the budget of prompts")
            return
        if self.prompt_budget_percent is not None:
            check_budget(self.prompt_budget_percent)
        if self.k_chunk is None:
            budget = DEFAULT_BUDGET_PERCENT if self.budget_percent is None else self.budget_percent
            check_budget(budget)
            object.__setattr__(self, "budget_percent", budget)
        elif self.budget_percent is not None:
            raise RequestError("a k_chunk and a budget exclude each other: leave out one of them")
        else:
            k_chunk_by_type(self.k_chunk)

    @classmethod
    def asked(
        cls,
        k_chunk: Mapping[str, int] | int | None,
        budget: float | Exact | None,
        prompt_budget: float | None = None,
        *,
        or_usual: bool = False,
    ) -> Compensation:
        """What a request, a setting or the command line asks for: the fields, with `EXACT` among the budgets.

        Raises:
            RequestError: as the class.
        """
        percent, exact = (None, True) if budget == EXACT else (budget, False)
        return cls(
            k_chunk=k_chunk,
            budget_percent=percent,
            prompt_budget_percent=prompt_budget,
            exact=exact,
            or_usual=exact and or_usual,
        )

    @property
    def budget(self) -> float | Exact | None:
        """The budget as a request or a setting has it; None with a fixed k_chunk."""
        return EXACT if self.exact else self.budget_percent

    @property
    def by_type(self) -> dict[str, int]:
        """The fixed k_chunk of every layer type; 0 with a budget, before the tuner has applied it."""
        return k_chunk_by_type(self.k_chunk or 0)

    @property
    def decodes(self) -> bool:
        """Whether decoded tokens may be compensated."""
        return bool(self.budget_percent) or any(self.by_type.values())

    @property
    def prompt_percent(self) -> float:
        """Slowdown budget of prompts: the given one, or the default if decoding is compensated."""
        if self.prompt_budget_percent is not None:
            return self.prompt_budget_percent
        return DEFAULT_PROMPT_BUDGET_PERCENT if self.decodes else 0.0

    @property
    def possible(self) -> bool:
        """Whether anything may be compensated."""
        return self.decodes or self.prompt_percent > 0


def of_settings(
    k_chunk: Mapping[str, int] | int | None,
    budget: float | Exact | None,
    override: Compensation | None = None,
    *,
    prompt_budget: float | None = None,
) -> Compensation:
    """Combine command line and settings: the command line wins, then a k_chunk in the settings, then a budget.

    Args:
        k_chunk: From the settings.
        budget: From the settings; ignored if there is a k_chunk. Where answers can't be exact, the default does.
        override: From the command line. If it turns compensation off, the settings do not turn it on.
        prompt_budget: From the settings, for prompts.
    """
    found = override or Compensation.asked(k_chunk, budget if k_chunk is None else None, or_usual=True)
    off = found.exact or (override is not None and not found.decodes)
    keep = prompt_budget is None or found.prompt_budget_percent is not None or off
    return found if keep else replace(found, prompt_budget_percent=prompt_budget)


def check_budget(budget_percent: float) -> None:
    """Raise a `RequestError` if a budget is not in [0, 100]."""
    if not 0 <= budget_percent <= LARGEST_BUDGET_PERCENT:
        raise RequestError(f"a slowdown budget is from 0 to {LARGEST_BUDGET_PERCENT} percent, not {budget_percent:g}")


def layer_kind(name: str) -> str:
    """The layer type of a linear layer: `qkv` for `layers.3.qkv`, `head` for `head`."""
    return name.rsplit(".", 1)[-1]


def in_block(block: int | str, kind: str) -> str:
    """Key of a layer type in one block, `layers.3.qkv`: its k_chunk instead of the type's."""
    return f"layers.{block}.{kind}"


def layer_words(key: str) -> str:
    """A layer type, or a type in one block, as people read it: `down`, `down of block 29`."""
    block = _block(key)
    return f"{layer_kind(key)} of block {block}" if block else key


def is_layer(key: str) -> bool:
    """Whether a key of a k_chunk is a layer type, or one in a block."""
    try:
        _place(key)
    except RequestError:
        return False
    return True


def check_blocks(k_chunk: Mapping[str, int], blocks: int) -> None:
    """Raise a `RequestError` if a k_chunk names a block that a model with so many does not have."""
    for key in k_chunk:
        if _block(key) and int(_block(key)) >= blocks:
            raise RequestError(f"k_chunk names {key}; the model's blocks are 0 to {blocks - 1}")


def k_chunk_within(k_chunk: Mapping[str, int] | int, first: int, last: int) -> Mapping[str, int] | int:
    """A k_chunk for the blocks from `first` up to `last`, as a part of the model numbers them."""
    if isinstance(k_chunk, int):
        return k_chunk
    own = {key: int(_block(key) or first) for key in k_chunk}
    return {
        in_block(own[key] - first, layer_kind(key)) if _block(key) else key: number
        for key, number in k_chunk.items()
        if first <= own[key] < last
    }


def k_chunk_of(k_chunk: Mapping[str, int] | int, name: str) -> int:
    """Salient channels per 1024 input channels of a linear layer.

    Args:
        k_chunk: One number for every layer, or one by layer type; absent types are not compensated. A type in one
            block (`in_block`) may have its own, which all experts of the block share.
        name: Name of the layer, as in `ModelSpec.linear_names`, or a layer type.

    Raises:
        RequestError: an unknown layer type, or a number outside [0, 1024].
    """
    if not isinstance(k_chunk, int):
        for key in k_chunk:
            _place(key)
        kind = layer_kind(name)
        k_chunk = k_chunk.get(in_block(_block(name), kind), k_chunk.get(kind, 0))
    return _checked(k_chunk)


def k_chunk_by_type(k_chunk: Mapping[str, int] | int) -> dict[str, int]:
    """k_chunk of every layer type, and behind them of types in single blocks that have their own.

    Raises:
        RequestError: as `k_chunk_of`.
    """
    from models.spec import LAYER_KINDS

    if isinstance(k_chunk, int):
        return dict.fromkeys(LAYER_KINDS, _checked(k_chunk))
    wanted = dict.fromkeys(LAYER_KINDS, 0) | {key: k_chunk[key] for key in sorted(k_chunk, key=_place)}
    return {key: _checked(number) for key, number in wanted.items()}


def _block(name: str) -> str:
    """The number in a name, `3` of `layers.3.qkv` and `layers.3.experts.5.down`; empty outside blocks."""
    return name.split(".")[1] if name.startswith("layers.") else ""


def _place(key: str) -> tuple[int, int]:
    """What a layer type, or a type in a block, is sorted by.

    Raises:
        RequestError: it is neither.
    """
    from models.spec import LAYER_KINDS

    kind, block = layer_kind(key), _block(key)
    if key in LAYER_KINDS:
        return -1, LAYER_KINDS.index(key)
    if kind in LAYER_KINDS and block.isdecimal() and key == in_block(int(block), kind):
        return int(block), LAYER_KINDS.index(kind)
    raise RequestError(f"k_chunk names the layer type {key!r}; the types are {', '.join(LAYER_KINDS)}")


def _checked(k_chunk: int) -> int:
    if not 0 <= k_chunk <= CHUNK:
        raise RequestError(f"k_chunk is {k_chunk}; it counts channels of {CHUNK}, so give a number from 0 to {CHUNK}")
    return k_chunk
