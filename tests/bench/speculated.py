"""Equality of speculation and the target alone: the same greedy tokens, the same perplexity when sampling.

    python -m tests.bench.speculated equal --stored FOLDER [--backend reference --tokens 500 --gamma 1 3 6 11]
    python -m tests.bench.speculated perplexity --stored FOLDER [--texts 40 --gamma 3]

Of drawn texts the target scores those that it decoded alone and those that it verified, each token after a plain step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from assets import evaluation_text
from models.store import StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.engine.speculation.gamma import FixedGamma
from runtime.engine.speculation.measure import continued
from runtime.load.open import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.bench.speculation import QUESTIONS

_HALF = 128
"""Tokens of a prompt, and of the text drawn after it."""


def equal(decoder: Decoder, prompt: Sequence[int], count: int, gammas: Sequence[int]) -> list[str]:
    """Decode greedily alone and with each gamma. Returns a line for each."""
    greedy = SamplingOptions(temperature=0)
    alone = continued(decoder, prompt, count, greedy, FixedGamma(0)).tokens
    lines = []
    for gamma in gammas:
        found = continued(decoder, prompt, count, greedy, FixedGamma(gamma))
        parted = next((i for i, pair in enumerate(zip(alone, found.tokens, strict=True)) if pair[0] != pair[1]), None)
        outcome = f"{count} tokens are the target's" if parted is None else f"parted from the target at token {parted}"
        lines.append(f"gamma {gamma}: {outcome}; {found.speculation.acceptance_rate:.0%} accepted")
        print(lines[-1], flush=True)
    return lines


def drawn_perplexity(decoder: Decoder, tokens: Sequence[int], texts: int, gamma: int) -> list[tuple[float, float]]:
    """Nats a token of texts drawn at temperature 1, without and with drafts, each scored by plain steps.

    Args:
        decoder: A loaded model.
        tokens: Of a real text, which prompts are taken from.
        texts: How many are drawn of each kind.
        gamma: Tokens drafted in a round.
    """
    scores = []
    for number in range(texts):
        start = number * (len(tokens) - _HALF) // texts
        prompt, own = tokens[start : start + _HALF], []
        for drafted in (0, gamma):
            sampling = SamplingOptions(temperature=1, seed=2 * number + (drafted > 0))
            text = [*prompt, *continued(decoder, prompt, _HALF, sampling, FixedGamma(drafted)).tokens]
            scored = perplexity(decoder, text, len(text), len(text), as_chat=True)
            own.append(scored.nll_sum / scored.tokens)
        scores.append((own[0], own[1]))
    return scores


def compared(scores: Sequence[tuple[float, float]]) -> str:
    """The mean of each kind, and how far apart they are in standard errors of the difference."""
    plain, speculated = zip(*scores, strict=True)
    errors = [statistics.stdev(kind) / len(kind) ** 0.5 for kind in (plain, speculated)]
    means = [statistics.mean(kind) for kind in (plain, speculated)]
    distance = abs(means[1] - means[0]) / sum(each**2 for each in errors) ** 0.5
    own, drafted = (f"{mean:.4f} ± {error:.4f}" for mean, error in zip(means, errors, strict=True))
    return f"plain {own} nats a token, speculated {drafted}: {distance:.2f} standard errors apart"


def main() -> None:
    """Compare, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("equal", "perplexity"))
    parser.add_argument("--stored", type=Path, required=True)
    parser.add_argument("--backend", choices=("reference", "cpu"), default="cpu")
    parser.add_argument("--k-chunk", type=int, nargs="+", default=[1024], help="of the target")
    parser.add_argument("--draft-k-chunk", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 3, 6, 11])
    asked = parser.parse_args()
    model = StoredModel.open_folder(asked.stored, asked.stored.name)
    tokenizer = Tokenizer(model.tokenizer_path)
    context = max(asked.tokens, _HALF) + 2 * _HALF
    decoder = open_decoder(model, DecoderOptions(kv="hierarchical", context=context), asked.backend)[0]
    for k_chunk in asked.k_chunk:
        decoder.set_k_chunk(k_chunk)
        decoder.set_draft_k_chunk(min(k_chunk, asked.draft_k_chunk))
        print(f"{model.name}, {asked.backend}, k_chunk {k_chunk}")
        if asked.what == "equal":
            equal(decoder, tokenizer.chat([{"role": "user", "content": QUESTIONS[1]}]), asked.tokens, asked.gamma)
        else:
            for gamma in asked.gamma:
                scores = drawn_perplexity(decoder, tokenizer.encode(evaluation_text()), asked.texts, gamma)
                print(f"gamma {gamma}: {compared(scores)}", flush=True)
    decoder.close()


if __name__ == "__main__":
    main()
