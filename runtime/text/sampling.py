"""Sampling: penalties, filters, the draw of the next token, and log-probabilities. Plain numpy.

Order, as in transformers: biases, penalties, temperature, top-k, top-p, min-p. No filter sorts the whole vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.errors import RequestError
from runtime.text.call_grammar import CallRules
from runtime.text.constraint import Constraint, Grammar

MAX_LOGPROBS = 20
"""Most alternatives reported for a token."""
NEGLIGIBLE = 30.0
"""Tokens less likely than the most likely one by e^-30 are never sampled: a whole vocabulary of them has probability
1e-8."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing the logits by them would overflow."""
MAX_STOPS = 16
"""Most stop strings of a request."""
MIN_PENALTY, MAX_PENALTY = 0.1, 10.0
"""Range of the repetition penalty: beyond it, it alone decides the answer."""

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling and stopping options of an answer.

    Raises:
        RequestError: a value outside its range.
    """

    temperature: float = 0.7
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens; 0 = all."""
    top_p: float = 0.95
    """Only the most likely tokens that together reach this probability, in (0, 1]."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in the answer are divided by it (multiplied if negative); 1 = none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the answer, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """The same, for each time that a token is in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits, in [-100, 100]; below, in effect, no token is drawn, above no other."""
    seed: int | None = None
    """The same seed gives the same samples; None = random."""
    max_tokens: int | None = None
    """Most tokens to generate; None = until the context is full."""
    thought_tokens: int | None = None
    """Most tokens of reasoning, those of `thought` included: then its closing tag is put into the answer. None = no
    limit."""
    thought: str = ""
    """The unfinished reasoning, with its tag, that ends the prompt and is continued."""
    stop: tuple[str, ...] = ()
    """Stop strings: they end the answer and are not part of it."""
    end_loops: bool = False
    """Whether an answer that only repeats itself ends (`runtime.engine.generation.LoopWatch`)."""
    logprobs: int | None = None
    """Number of alternatives to report with each token's log-probability; None = no log-probabilities."""
    grammar: Grammar | None = None
    """Grammar of the answer, unless it calls tools; None = anything."""
    calls: CallRules | None = None
    """Tools that the answer may call, or must; None = none."""

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number from 0 up"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or a positive number"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY,
                f"from {MIN_PENALTY:g} to {MAX_PENALTY:g}",
            ),
            ("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            (
                "logit_bias",
                self.logit_bias,
                all(token >= 0 and -100 <= bias <= 100 for token, bias in self.logit_bias),
                "tokens with numbers from -100 to 100",
            ),
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("thought_tokens", self.thought_tokens, (self.thought_tokens or 0) >= 0, "0 or a positive number"),
            ("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "from 0 to 20"),
        )
        for name, value, acceptable, wanted in rules:
            if not acceptable:
                raise RequestError(f"{name} is {value}; it must be {wanted}")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise RequestError(f"stop must hold at most {MAX_STOPS} texts, none of them empty")

    @property
    def formed(self) -> bool:
        """Whether the whole answer has a given form, which leaves no room for reasoning."""
        return self.grammar is not None or (self.calls is not None and self.calls.required)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token is in the answer."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens are in the answer."""
        return self.repetition_penalty != 1 or self.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    token: int
    text: str
    """The token on its own."""
    logprob: float
    """Natural logarithm of its probability under the model, before penalties, temperature and filters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The log-probability of a sampled token, and of the most likely ones."""

    token: int
    text: str
    """The token on its own."""
    logprob: float
    """As in `Alternative`."""
    top: tuple[Alternative, ...] = ()
    """The requested number of most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The input for sampling a token on the device; see `runtime.backends.decoder.DrawsTokens`."""

    options: SamplingOptions
    """Temperature, filters, penalty, and the number of log-probabilities."""
    uniform: float
    """Random number in [0, 1) from the answer's own stream; unused if greedy."""
    seen: Int64Array
    """[n] distinct tokens that the repetition penalty applies to."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token sampled on the device; the logits stay there."""

    token: int
    logprob: float | None = None
    """Its log-probability, as from `log_probabilities`; None unless requested."""
    ranked: Sequence[tuple[int, float]] = ()
    """(token, log-probability) of the requested number of most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Distribution of the next token."""

    tokens: Int64Array
    """[n] allowed token ids, ascending, n >= 1."""
    weights: Float64Array
    """[n] non-negative weights proportional to probabilities, with a positive sum."""

    def probability(self, token: int) -> float:
        """The probability of a token; 0 if it is not allowed."""
        place = int(np.searchsorted(self.tokens, token))
        if place == self.tokens.size or self.tokens[place] != token:
            return 0.0
        return float(self.weights[place] / self.weights.sum())


class Sampler:
    """Samples the tokens of one answer."""

    def __init__(
        self, options: SamplingOptions, seen: Sequence[int] = (), constraint: Constraint | None = None
    ) -> None:
        """Start an answer.

        Args:
            options: Sampling options.
            seen: Tokens that the repetition penalty treats as used. The prompt's are not included: an answer repeats
                the words of its question for good reasons.
            constraint: The grammar's state, which rules out drafts; None: any token is allowed.
        """
        self._options, self._constraint = options, constraint
        self._biased = np.array([token for token, _ in options.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in options.logit_bias], np.float32)
        self._random = np.random.Generator(np.random.PCG64(None if options.seed is None else options.seed % 2**64))
        self._seen, times = np.unique(np.array(seen if options.penalizes else [], np.int64), return_counts=True)
        self._times = dict(zip(self._seen.tolist(), times.tolist(), strict=True))

    @property
    def constrained(self) -> bool:
        """Whether a grammar decides what may be drawn: token by token, on the host."""
        return self._constraint is not None

    @property
    def needs_logits(self) -> bool:
        """Whether tokens are drawn on the host: by a grammar, or by what the device does not know."""
        return self.constrained or self._options.counts or bool(self._options.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self._options.greedy

    def draw(self, logits: Float32Array) -> int:
        """The next token, which counts as seen from now on.

        Args:
            logits: float32 [V], finite; left as they are.
        """
        token = int(self._penalized(logits).argmax()) if self.greedy else self.pick(self.distribution(logits))
        self.note(token)
        return token

    def draw_inputs(self) -> Draw:
        """The input for sampling the next token on the device; advances the random stream as `draw` would.

        Pass the returned token to `note`.
        """
        return Draw(self._options, 0.0 if self.greedy else self.uniform(), self._seen)

    def distribution(self, logits: Float32Array, since: Sequence[int] = ()) -> Distribution:
        """Distribution of the next token.

        Args:
            logits: float32 [V], finite; not modified.
            since: Tokens before it that are not noted, as in a draft.
        """
        logits = self._penalized(logits, since)
        if self.greedy:
            return Distribution(np.array([logits.argmax()], np.int64), np.ones(1))
        return Distribution(*filtered(logits, self._options))

    def _penalized(self, logits: Float32Array, since: Sequence[int] = ()) -> Float32Array:
        """Logits [V] after the grammar's mask, the biases and the penalties, if any."""
        if self._constraint is not None:
            logits = self._constraint.masked(logits)
        if self._biased.size:
            logits = logits.copy()
            logits[self._biased] += self._biases
        options = self._options
        if not options.penalizes or not (self._seen.size or since):
            return logits
        seen = np.concatenate((self._seen, np.array(since, np.int64)))
        logits = _penalize(logits, seen, options.repetition_penalty)
        if options.counts:
            seen, more = np.unique(seen), Counter(since)
            times = np.fromiter((self._times.get(token, 0) + more[token] for token in seen.tolist()), np.float32)
            logits[seen] -= options.presence_penalty + options.frequency_penalty * times
        return logits

    def pick(self, distribution: Distribution) -> int:
        cumulative = distribution.weights.cumsum()
        place = int(np.searchsorted(cumulative, self.uniform() * cumulative[-1], side="right"))
        return int(distribution.tokens[min(place, distribution.tokens.size - 1)])

    def uniform(self) -> float:
        """A random number in [0, 1)."""
        return float(self._random.random())

    def note(self, token: int) -> None:
        """Count a token as seen."""
        if self._constraint is not None:
            self._constraint.take(token)
        if self._options.penalizes:
            if token not in self._times:
                self._seen = np.append(self._seen, token)
            self._times[token] = self._times.get(token, 0) + 1


def _penalize(logits: Float32Array, seen: Int64Array, penalty: float) -> Float32Array:
    """A copy of logits [V] with each seen token's logit reduced once. Source: CTRL, §4.1 of arXiv:1909.05858."""
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def filtered(logits: Float32Array, options: SamplingOptions) -> tuple[Int64Array, Float64Array]:
    """The tokens that pass the filters, and their weights.

    Args:
        logits: float32 [V].
        options: Options with temperature above 0; top_k, top_p and min_p apply.

    Returns:
        Token ids int64 [n], n >= 1, and weights float64 [n], proportional to probabilities.
    """
    highest, T = np.float32(logits.max()), np.float32(options.temperature)
    k, top_p = options.top_k, options.top_p
    if top_p < 1 and not 0 < k < logits.size:  # of 50,000 tokens few can matter
        weights = np.exp((logits - highest) / T)
        tokens, kept_weights = _nucleus(weights, top_p)
        return _likely(tokens, kept_weights, options.min_p)
    tokens = np.flatnonzero(logits >= highest - np.float32(NEGLIGIBLE) * T)
    chosen = logits[tokens]
    if 0 < k < tokens.size:
        best = np.sort(np.argpartition(chosen, tokens.size - k)[tokens.size - k :])
        tokens, chosen = tokens[best], chosen[best]
    weights = np.exp((chosen - highest) / T)
    if top_p < 1:
        kept, kept_weights = _nucleus(weights, top_p)
        return _likely(tokens[kept], kept_weights, options.min_p)
    return _likely(tokens, weights.astype(np.float64), options.min_p)


def _likely(tokens: Int64Array, weights: Float64Array, min_p: float) -> tuple[Int64Array, Float64Array]:
    """Tokens at least min_p times as likely as the most likely one."""
    if min_p == 0:
        return tokens, weights
    likely = weights >= min_p * weights.max()
    return tokens[likely], weights[likely]


def _nucleus(weights: Float32Array, top_p: float) -> tuple[Int64Array, Float64Array]:
    """The smallest set of largest weights that reaches the share top_p of their sum: indices, ascending, and weights.

    Weights below (1 - top_p) / n of the sum cannot be in it: together they stay below 1 - top_p. So only the others are
    sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    possible = np.flatnonzero(weights >= (1 - top_p) * total / weights.size)
    own = weights[possible].astype(np.float64)
    order = np.argsort(-own, kind="stable")
    enough = int(np.searchsorted(own[order].cumsum(), top_p * total)) + 1
    kept = np.sort(order[:enough])
    return possible[kept], own[kept]


def log_probabilities(logits: Float32Array, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of a token, and of the `count` most likely ones, under the unfiltered distribution.

    Args:
        logits: float32 [V].
        token: The sampled token.
        count: How many of the most likely tokens to report.

    Returns:
        The token's log-probability, and (token, log-probability) of the most likely, most likely first.
    """
    highest = float(logits.max())
    normalizer = highest + math.log(float(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    count = min(count, logits.size)
    best = np.argpartition(logits, logits.size - count)[logits.size - count :] if count else np.empty(0, np.int64)
    ranked = sorted(((int(i), float(logits[i]) - normalizer) for i in best), key=lambda pair: (-pair[1], pair[0]))
    return float(logits[token]) - normalizer, ranked


def token_logprob(
    own: Float32Array | Drawn, token: int, count: int | None, piece: Callable[[int], str]
) -> TokenLogprob | None:
    """The log-probability of a sampled token and of `count` alternatives, if requested.

    Args:
        own: The logits float32 [V] that it was sampled from, or the decoder's own sample.
        token: The sampled token.
        count: As `SamplingOptions.logprobs`.
        piece: Turns a token into text.
    """
    if count is None:
        return None
    if isinstance(own, Drawn):
        assert own.logprob is not None
        value, ranked = own.logprob, own.ranked
    else:
        value, ranked = log_probabilities(own, token, count)
    top = tuple(Alternative(token=i, text=piece(i), logprob=p) for i, p in ranked)
    return TokenLogprob(token=token, text=piece(token), logprob=value, top=top)
