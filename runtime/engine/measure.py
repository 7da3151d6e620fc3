"""Speedup of speculation on a loaded model: decodes the same text with and without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder, Float32Array, PredictsFurther, Step
from runtime.engine.conversations import Conversations
from runtime.engine.copying import StepTimes
from runtime.engine.costs import measure_costs
from runtime.engine.decoding import DecodeContext, Rounds
from runtime.engine.gamma import MAX_SEARCHED, AdaptiveGamma, Costs, FixedGamma, Gamma, break_even
from runtime.engine.generation import Speculation
from runtime.engine.mtp import MtpDrafts
from runtime.engine.scheduler import run_alone
from runtime.errors import Cancelled, RequestError
from runtime.text.sampling import Drawn, Sampler, SamplingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A continuation of a prompt, and its timings."""

    tokens: Sequence[int]
    """The tokens."""
    seconds: float
    """Seconds of the tokens after the first."""
    speculation: Speculation

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSpeed:
    """Decoding speed with and without speculation."""

    plain: Continuation
    speculated: Continuation
    costs: Costs
    """Step durations behind the prompt."""

    @property
    def speedup(self) -> float:
        """Throughput with speculation relative to without."""
        return self.speculated.tokens_per_s / self.plain.tokens_per_s

    @property
    def break_even(self) -> float | None:
        """The lowest acceptance at which speculation pays behind the prompt; None: it never does."""
        return break_even(self.costs)


def measure_speculation(
    decoder: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    gamma: int | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> SpeculationSpeed:
    """Continue a prompt greedily, with and without speculation. Overwrites slot 0.

    Args:
        decoder: A loaded model.
        prompt: Tokens of real text: drafts of random tokens are meaningless.
        count: Tokens to decode, at least 2.
        gamma: Tokens to draft per round; None: adaptive.
        cancelled: Polled between steps.

    Raises:
        RequestError: the lengths do not fit the context.
        Cancelled: `cancelled` said so.
    """
    sampling = SamplingOptions(temperature=0)
    costs = _costs_behind(decoder, prompt, cancelled)
    chosen = AdaptiveGamma(costs) if gamma is None else FixedGamma(gamma)
    plain, speculated = (
        continued(decoder, prompt, count, sampling, each, cancelled=cancelled) for each in (FixedGamma(0), chosen)
    )
    return SpeculationSpeed(plain=plain, speculated=speculated, costs=costs)


def _costs_behind(decoder: Decoder, prompt: Sequence[int], cancelled: Callable[[], bool]) -> Costs:
    """Step durations behind a prompt, or as far into it as leaves room for the rows of a step."""

    def check() -> None:
        if cancelled():
            raise Cancelled("the measurement was stopped")

    position = min(len(prompt), decoder.options.context - MAX_SEARCHED - 1)
    if position > 0:
        with decoder.session():
            _prefill(decoder, prompt[:position], check)
    return measure_costs(decoder, position=position, cancelled=cancelled)


def continued(
    decoder: Decoder,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingOptions,
    gamma: Gamma,
    *,
    times: StepTimes | None = None,
    mtp: MtpDrafts | None = None,
    ends: Collection[int] = (),
    clock: Callable[[], float] = time.perf_counter,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Continuation:
    """Continue a prompt by a number of tokens, or up to an end token. Overwrites slot 0.

    Args:
        decoder: A loaded model.
        prompt: Tokens.
        count: Tokens to decode, at least 2.
        sampling: Sampling options.
        gamma: Draft-length policy of the model's own drafts.
        times: Step durations, to also copy drafts from the text; None: no copying.
        mtp: The block that drafts in place of the model.
        ends: Tokens that end the continuation.
        clock: The clock, in seconds.
        cancelled: Polled between steps.

    Raises:
        RequestError: the lengths do not fit the context.
        Cancelled: `cancelled` said so.
    """
    if count < 2 or len(prompt) + count > decoder.options.context:
        raise RequestError(
            f"{len(prompt)} tokens and {count} after them were asked for: at least 2, in a context of "
            f"{decoder.options.context}"
        )

    def check() -> None:
        if cancelled():
            raise Cancelled("the measurement was stopped")

    conversations = Conversations(decoder.cache, slots=decoder.options.slots, context=decoder.options.context)
    conversations.clear(0)
    context = DecodeContext(decoder=decoder, conversations=conversations, slot=0, clock=clock)
    rounds = Rounds(context, Sampler(sampling), gamma, ends=ends, times=times, mtp=mtp)
    tokens: list[int] = []
    began = 0.0

    def take(token: int, _own: Float32Array | Drawn) -> bool:
        nonlocal began
        check()
        began = began or clock()
        tokens.append(token)
        return len(tokens) < count and token not in ends

    with decoder.session():
        logits = _prefill(decoder, prompt, check, mtp)
        conversations.tokens(0).extend(prompt)
        run_alone(decoder, rounds.decode(logits, take, lambda: count - len(tokens)))
        seconds = clock() - began
    return Continuation(tokens=tokens, seconds=seconds, speculation=rounds.result())


def _prefill(
    decoder: Decoder, prompt: Sequence[int], check: Callable[[], None], mtp: MtpDrafts | None = None
) -> Float32Array:
    """Prefill a prompt in slot 0. Returns the logits [V] after its last token."""
    rows = decoder.options.max_rows
    if mtp is not None:
        mtp.begin(0, ())
    for start in range(0, len(prompt), rows):
        check()
        end = min(start + rows, len(prompt))
        last_row = [end - start - 1] if end == len(prompt) else []
        logits = decoder.forward(Step.of(prompt[start:end], start, last_row, prefill=True))
        if mtp is not None:
            mtp.follow(0, start, prompt[start:end], cast("PredictsFurther", decoder).left())
    last: Float32Array = logits[0]
    return last
