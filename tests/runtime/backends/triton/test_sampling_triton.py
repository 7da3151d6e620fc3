"""Tokens drawn on the card against `runtime.text.sampling`: exactly where greedy, in distribution elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.backends.triton.sampling import SEEN, HostDraws, draw, filtered
from runtime.text.sampling import Drawn, Sampler, SamplingOptions, log_probabilities
from runtime.text.sampling import filtered as plain

V = 3000
CASES: dict[str, SamplingOptions] = {
    "plain": SamplingOptions(temperature=1.0, top_p=1.0),
    "cool": SamplingOptions(temperature=0.3, top_p=1.0),
    "top_k": SamplingOptions(temperature=1.0, top_k=40, top_p=1.0),
    "top_p": SamplingOptions(temperature=1.2, top_p=0.9),
    "min_p": SamplingOptions(temperature=1.5, top_p=1.0, min_p=0.05),
    "all": SamplingOptions(temperature=0.8, top_k=100, top_p=0.95, min_p=0.01),
    "all of them": SamplingOptions(temperature=1.0, top_k=V + 1, top_p=1.0),
}


def drawn(sampler: Sampler, logits: torch.Tensor) -> Drawn:
    """What a sampler's order draws on the logits' device."""
    order, draws = sampler.draw_inputs(), HostDraws(2, logits.numel(), pinned=logits.is_cuda)
    draws.launch(1, order.options, draws.put(1, order), logits)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return draws.result(1, order.options)


def logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_plain_ones(device: str, case: str) -> None:
    """The same tokens, as likely to the last bits of an exponential; a token at a filter's edge may be in or out."""
    for seed in range(5):
        x = logits(seed)
        tokens, weights = plain(x.numpy(), CASES[case])
        wanted = np.zeros(V)
        wanted[tokens] = weights / weights.sum()
        found = filtered(x.to(device), CASES[case]).cpu().numpy()
        found = found / found.sum()
        assert np.abs(found - wanted).sum() < 1e-5
        assert abs(int((found > 0).sum()) - tokens.size) <= 1


@pytest.mark.parametrize("case", CASES)
def test_a_seed_gives_the_plain_sampler_s_tokens(device: str, case: str) -> None:
    options = SamplingOptions(
        **{name: getattr(CASES[case], name) for name in ("temperature", "top_k", "top_p", "min_p")}, seed=11
    )
    sampler, stream = Sampler(options), np.random.Generator(np.random.PCG64(11))
    same = 0
    for seed in range(200):
        x = logits(seed % 7)
        uniform = torch.tensor([stream.random()], dtype=torch.float64, device=device)
        same += int(draw(x.to(device), options, uniform)) == sampler.draw(x.numpy())
    assert same >= 199


@pytest.mark.parametrize("options", [SamplingOptions(temperature=0), SamplingOptions(temperature=2.0, top_k=1)])
def test_greedy_is_the_plain_choice(device: str, options: SamplingOptions) -> None:
    """The first of equal ones, on the CPU as here."""
    for seed in range(20):
        x = logits(seed)
        x[[5, 70]] = x.max() + 1 if seed % 2 else x.max()
        found = int(draw(x.to(device), options, torch.zeros(1, dtype=torch.float64, device=device)))
        assert found == Sampler(options).draw(x.numpy())


def test_draws_follow_the_weights(device: str) -> None:
    """Chi-squared of 4,000 draws over five classes of tokens."""
    options, x = SamplingOptions(temperature=1.0, top_k=50, top_p=0.98), logits(3).to(device)
    weights = filtered(x, options).cpu().numpy()
    classes = np.argsort(-weights)[:50] % 5
    order = np.argsort(-weights)[:50]
    stream = np.random.default_rng(0)
    counts = np.zeros(V)
    uniforms = torch.tensor(stream.random(4000), dtype=torch.float64, device=device)
    for uniform in uniforms.split(1):
        counts[int(draw(x, options, uniform))] += 1
    assert counts[weights == 0].sum() == 0
    expected = np.bincount(classes, weights=weights[order], minlength=5)
    expected *= 4000 / weights.sum()
    found = np.bincount(classes, weights=counts[order], minlength=5)
    assert ((found - expected) ** 2 / np.maximum(expected, 1)).sum() < 20


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_stream_draw_tokens_that_may_be_drawn(device: str, uniform: float) -> None:
    options, x = SamplingOptions(temperature=1.0, top_k=3, top_p=1.0), logits(0).to(device)
    token = int(draw(x, options, torch.tensor([uniform], dtype=torch.float64, device=device)))
    assert token in x.topk(3).indices.tolist()


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0, repetition_penalty=1.3),
        SamplingOptions(temperature=0.9, repetition_penalty=1.3, seed=4),
    ],
    ids=["greedy", "drawn"],
)
def test_penalties_are_the_plain_sampler_s(device: str, options: SamplingOptions) -> None:
    """Of one answer's tokens, whose likely ones grow less likely; both samplers note what they drew."""
    ours, theirs = Sampler(options, [1, 2, 2]), Sampler(options, [1, 2, 2])
    x = 3 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    there, found, wanted = x.to(device), [], []
    for _ in range(60):
        found.append(drawn(ours, there).token)
        ours.note(found[-1])
        wanted.append(theirs.draw(x.numpy()))
    assert found == wanted
    assert len(set(found)) > 1


def test_an_answer_of_more_tokens_than_a_captured_draw_takes_is_penalized_all_the_same(device: str) -> None:
    x = 3 * torch.randn(SEEN + 200, generator=torch.Generator().manual_seed(0))
    options = SamplingOptions(temperature=0, repetition_penalty=1.3)
    seen = x.argsort(descending=True)[: SEEN + 100].tolist()
    ours, theirs = Sampler(options, seen), Sampler(options, seen)
    assert drawn(ours, x.to(device)).token == theirs.draw(x.numpy())


@pytest.mark.parametrize("count", [0, 5])
def test_log_probabilities_are_the_plain_ones(device: str, count: int) -> None:
    """Before penalties and filters, of the token drawn and of the most likely."""
    x = logits(1)
    options = SamplingOptions(temperature=1.3, top_k=3, repetition_penalty=1.5, logprobs=count, seed=2)
    found = drawn(Sampler(options, range(V)), x.to(device))
    value, ranked = log_probabilities(x.numpy(), found.token, count)
    assert found.logprob == pytest.approx(value, abs=1e-5)
    assert [token for token, _ in found.ranked] == [token for token, _ in ranked]
    assert [each for _, each in found.ranked] == pytest.approx([each for _, each in ranked], abs=1e-5)


def test_numbers_that_are_not_finite_draw_a_token_that_there_is(device: str) -> None:
    """The flag tells of them afterwards: until then nothing may read outside of the vocabulary."""
    for options in (SamplingOptions(temperature=0, logprobs=1), SamplingOptions(seed=1, top_k=5, logprobs=1)):
        assert 0 <= drawn(Sampler(options), torch.full((V,), torch.nan, device=device)).token < V
