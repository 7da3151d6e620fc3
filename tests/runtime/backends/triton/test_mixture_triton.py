"""Mixtures of experts on the GPU decoder against the reference decoder: interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.architecture import Builder, Graph
from models.recipe import Recipe
from models.spec import MixtureSpec
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations.compensation import dequantize_residual
from runtime.backends.operations.linear import dequantize
from runtime.backends.reference import decoder as reference_decoder
from runtime.backends.triton import placement
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.experts import GpuExperts
from runtime.backends.triton.kernels import experts as products
from runtime.backends.triton.kernels.activations import piece_sums
from runtime.backends.triton.sizes import expert_bytes
from runtime.backends.triton.timer import launch
from runtime.kv.kinds import KINDS
from tests.close import assert_close
from tests.grid import grid
from tests.runtime.backends.triton.decoding import (
    assert_logits,
    assert_replayed,
    assert_same,
    behind_pages,
    both,
    step,
    text,
)
from tests.runtime.conftest import SINKS

SLOW = pytest.mark.slow
MIXTURE = MixtureSpec(experts=5, chosen=2, width=40, normalized=True)
SHAPES: dict[str, tuple[MixtureSpec, dict[str, Any]]] = {
    "3bit": (MIXTURE, {"bits": 3, "residual_bits": 4}),
    "dense-first": (replace(MIXTURE, dense=(0,), normalized=False), {"bits": 4, "residual_bits": 2}),
    "gated": (replace(MIXTURE, experts=4, shared=2), {"bits": 4, "residual_bits": 16}),
    "sigmoids": (
        replace(MIXTURE, scoring="sigmoid", corrected=True, scale=1.8, shared=1, gated=False),
        {"bits": 4, "residual_bits": 8},
    ),
    "one": (replace(MIXTURE, chosen=1), {"bits": 4, "residual_bits": 4}),
    "biases": (replace(MIXTURE, bias=True), {"bits": 4, "residual_bits": 8}),
    "beside": (replace(MIXTURE, parallel_mlp=True), {"bits": 4, "residual_bits": 4}),
    "ungated": (replace(MIXTURE, experts=4, shared=1, gated=False), {"bits": 4, "residual_bits": 4}),
}
CLAMPED: dict[str, Any] = {
    **SINKS, "num_layers": 2, "windows": (3, None), "activation": "clamped_silu", "gate_limit": 1.0
}  # fmt: skip
"""The rest of the block of models whose experts have biases."""
NORMED: dict[str, Any] = {
    "num_layers": 2, "norm_after": True, "inner_eps": 1e-2, "activation": "gelu_tanh", "scaled": True
}  # fmt: skip
"""And of those whose experts are beside an MLP."""


@pytest.fixture(autouse=True)
def _half_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's routers as the GPU's, which read inputs of half precision."""
    gemv = reference_decoder.gemv
    monkeypatch.setattr(reference_decoder, "gemv", lambda x, *weights: gemv(x.half().float(), *weights))


def model_of(small: Any, shape: str) -> Any:
    mixture, build = SHAPES[shape]
    changes = CLAMPED if mixture.bias else NORMED if mixture.parallel_mlp else {"num_layers": 1 + len(mixture.dense)}
    if shape == "ungated":
        changes |= {"activation": "relu2", "num_layers": 2, "bare": (0,)}
    model = small({**changes, "mixture": mixture}, **build)
    rng = np.random.default_rng(0)
    for name, linear in model.linears.items():
        if ".experts." in name and name.endswith("down"):  # whose inputs are not those of the other experts
            model.linears[name] = replace(linear, mean_square=rng.random(linear.shape[1]).astype(np.float32))
    return model


NEAR = 3e-2
"""Of the logits' spread: routers turn what half precision rounds into shares. A logit of 8, as here, is off by 2^-11 of
itself then, and so is a share by 0.4 %. A wrong expert, share or residual is off by the logits' spread."""


@pytest.mark.parametrize("shape", grid(SHAPES, {"gated"}))
def test_logits_match_the_reference(small: Any, device: str, shape: str) -> None:
    """A few rows and a token, compensated and not, and a prompt's many rows, each with their own channels."""
    options = DecoderOptions(context=48, max_rows=18, k_chunk=300, select="static")
    steps = (
        step([5, 9, 3, 47, 12], 0, rows=[1, 4], compensate=False),
        step([17], 5),
        step([33, 34], 4, rows=[0, 1]),
        step(text(17), 6, rows=[2, 16]),
    )
    assert_same(*both(model_of(small, shape), options, device), steps, NEAR)


def test_experts_are_added_beside_an_mlp(small: Any, device: str) -> None:
    """A token, compensated; longer tests are among those of all shapes."""
    options = DecoderOptions(context=16, k_chunk=300, select="static")
    assert_same(*both(model_of(small, "beside"), options, device), [step([17], 0)], NEAR)


SOME = {"qkv": 300, "gate_up": 700, "down": 300, "head": 1}


@pytest.mark.parametrize(
    ("shape", "prompt"),
    [
        ("3bit", SOME),
        *(pytest.param(shape, SOME, marks=SLOW) for shape in ("dense-first", "gated", "biases", "beside", "ungated")),
        *(pytest.param("3bit", prompt, marks=SLOW) for prompt in ({"down": 1024}, 1024)),
        pytest.param("biases", 1024, marks=SLOW),
    ],
)
def test_prompts_match_the_reference(small: Any, device: str, shape: str, prompt: Any) -> None:
    """Many rows from copies of the residuals, a few that fetch by themselves, one, and a decoded token behind them."""
    options = DecoderOptions(context=48, max_rows=17, k_chunk=300, prompt_k_chunk=prompt, select="static")
    steps = [
        step(text(17), 0, rows=[1, 16], prefill=True),
        step([17, 4, 9], 17, prefill=True),
        step([18], 20, prefill=True),
        step([17], 21),
    ]
    ours, theirs = both(model_of(small, shape), options, device)
    assert_same(ours, theirs, steps, NEAR)
    ours.set_prompt_k_chunk(0)
    plain = np.array(ours.forward(steps[0]))
    ours.set_prompt_k_chunk(prompt)
    assert np.abs(plain - np.array(ours.forward(steps[0]))).max() > 0


@pytest.mark.parametrize("kv", grid(KINDS, {"int4"}))
def test_experts_with_biases_read_pages_of_every_cache(small: Any, device: str, kv: Any) -> None:
    """Behind a prompt that fills a page or cuts one off its window: a token, a few, and one in place of the last."""
    ours, theirs, at = behind_pages(model_of(small, "biases"), kv, device)
    steps = (step([17], at), step([33, 34, 5], at + 1, rows=[0, 2]), step([21], at + 3))
    assert_same(ours, theirs, steps, NEAR)


@pytest.mark.parametrize("select", grid(["approx", "exact", "random"], {"approx"}))
def test_every_selector_compensates_experts(small: Any, device: str, select: Any) -> None:
    """A token in whose place another choice of channels would be seen; `random` counts a row's position for each."""
    options = DecoderOptions(context=16, max_rows=3, k_chunk=512, select=select, seed=5)
    model = model_of(small, "gated")
    ours, theirs = both(model, options, device)
    for one in (step([5, 9, 3], 0, rows=[2]), step([17], 3)):
        plain = np.array(ours.forward(replace(one, compensate=False)))
        found, wanted = np.array(ours.forward(one)), theirs.forward(one)
        # Of two channels that are equal but for the last bit, either may be taken.
        assert np.abs(found - wanted).mean() < 0.3 * np.abs(plain - wanted).mean()


def test_a_row_has_the_same_bits_alone_and_in_a_batch(small: Any, device: str) -> None:
    """As drafts must, to be checked by several rows at once."""
    model = model_of(small, "sigmoids")
    decoder = TritonDecoder(model, DecoderOptions(context=16, slots=2, max_rows=4, k_chunk=300), device)
    made = Builder(model.spec)
    inside = made.read(made.node("embed"), 0, "post_norm")
    read, experts = Graph.of(made.nodes), made.node("experts", inside, inside, layer=0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 32, generator=generator).half().to(device)
    found = []
    for rows in (slice(0, 3), slice(1, 2)):
        run = decoder._pass(decoder._begin(step([7] * (rows.stop - rows.start), 0)))
        x = run.run(read)
        x.tensor.copy_(inputs[rows])
        assert isinstance(x.left, torch.Tensor)
        x.left.copy_(inputs[rows].float().sum(1, keepdim=True))
        out = run.experts(experts)
        assert out.dec is not None
        found.append((out.tensor.clone(), out.dec.clone()))
    assert torch.equal(found[0][0][1], found[1][0][0])
    assert torch.equal(found[0][1][1], found[1][1][0])


def test_recall_is_measured_for_every_pair(small: Any, device: str) -> None:
    """Of `gate_up` once a row, of `down` once for each of its experts; theirs are those that they choose from."""
    model, chosen = model_of(small, "3bit"), MIXTURE.chosen
    options = DecoderOptions(context=16, k_chunk={"gate_up": 400, "down": 400}, select="static", measure_recall=True)
    ours, theirs = both(model, options, device)
    for one in (step([5, 9], 0), step([7, 33, 50], 2)):
        ours.forward(one)
        theirs.forward(one)
    assert ours._selections == 5 * model.spec.num_layers * (1 + chosen)
    assert ours.recall is not None
    assert theirs.recall is not None
    down = [theirs.linears[name] for name in theirs.linears if name.endswith("down")]
    gate_up = [theirs.linears[name] for name in theirs.linears if name.endswith("gate_up")]
    wanted = sum(linear.recall_sum for linear in down) + sum(linear.recall_sum for linear in gate_up) / chosen
    assert ours.recall == pytest.approx(wanted / ours._selections, abs=1e-3)


def test_large_blocks_multiply_as_small_ones_do(small: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which size a step takes depends on how many pairs an expert has."""
    model = model_of(small, "3bit")
    options = DecoderOptions(context=48, max_rows=20, prompt_k_chunk=300)
    one = step(text(20), 0, prefill=True)
    small = np.array(TritonDecoder(model, options, device).forward(one))
    monkeypatch.setattr(products, "LARGE_FROM", 1)
    assert products.block_of(40, 5) == products.LARGE
    assert_logits(np.array(TritonDecoder(model, options, device).forward(one)), small, NEAR)


@pytest.mark.parametrize("shape", grid(["3bit", "gated", "dense-first"], {"gated"}))
def test_logits_have_the_same_bits_wherever_experts_are(
    small: Any, device: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While experts exchange their places, with and without compensation, for tokens and for prompts."""
    monkeypatch.setattr(placement, "WINDOW", 7)
    model = model_of(small, shape)
    options = DecoderOptions(context=64, max_rows=18, k_chunk=300, prompt_k_chunk=300)
    steps = [
        step(text(18), 0, rows=[0, 17], prefill=True),
        *(step([(11 * i) % 61], 18 + i) for i in range(4)),
        step([33, 34, 5], 22, rows=[0, 2], compensate=False),
    ]
    whole = TritonDecoder(model, options, device)
    assert whole.experts is None
    wanted = [np.array(whole.forward(one)) for one in steps]
    for most in (SHAPES[shape][0].shared + 1, 0):
        ours = TritonDecoder(model, replace(options, experts_on_device=most), device)
        placed = ours.experts
        assert placed is not None
        assert (placed.on_device, placed.held, placed.hit_rate) == (most, SHAPES[shape][0].num_experts, None)
        tables = [w.places.clone() for w in ours.model._weights() if isinstance(w, GpuExperts)]
        for one, logits in zip(steps, wanted, strict=True):
            assert np.array_equal(ours.forward(one), logits)
        after = ours.experts
        assert after is not None
        assert after.hit_rate is not None
        assert (after.hit_rate > 0) == (most > 0)
        assert after == replace(placed, hit_rate=after.hit_rate)
        moved = [w.places for w in ours.model._weights() if isinstance(w, GpuExperts)]
        same = [torch.equal(*pair) for pair in zip(tables, moved, strict=True)]
        assert all(same) if not most else not any(same), "some experts come for others"
        one = expert_bytes(model.spec, Recipe(bits=SHAPES[shape][1]["bits"], group_size=32))
        assert placed.host_bytes == (placed.held - most) * one, "as planned"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["gated", "beside"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_replayed_graph_goes_to_other_experts(small: Any, cuda: str, rows: int, shape: str) -> None:
    """A token, a few rows, and a full step of a prompt: numbers and places of experts are read when the graph runs."""
    model = model_of(small, shape)
    options = DecoderOptions(context=100, max_rows=20, k_chunk=128, prompt_k_chunk=256)
    launched = TritonDecoder(model, options, cuda)
    captured = TritonDecoder(model, replace(options, experts_on_device=3), cuda)
    tokens = [[(11 * turn + i) % 61 for i in range(rows)] for turn in range(5)]
    steps = (step(own, rows * turn, prefill=rows == options.max_rows) for turn, own in enumerate(tokens))
    assert_replayed(captured, launched, steps)


def test_the_timer_multiplies_with_as_many_experts_as_a_token_goes_to(small: Any, device: str) -> None:
    """Different ones, or their weights would come from the cache; with their compensation."""
    model, read = model_of(small, "gated"), SHAPES["gated"][0].experts_per_token
    decoder = TritonDecoder(model, DecoderOptions(context=16, k_chunk=1024, select="exact"), device)
    weights = {
        name: dequantize(packed) + dequantize_residual(packed.residual, packed.shape[0]).T
        for name, packed in model.linears.items()
        if ".experts." in name
    }
    x = torch.randn(read, 40, generator=torch.Generator().manual_seed(2)).half()
    chosen = torch.arange(read, dtype=torch.int32, device=device)[None]
    for kind, width, rows in (("gate_up", 32, 1), ("down", 40, read)):
        inputs = x[:rows, :width].contiguous()
        decoder.buffers.input(rows, width).copy_(inputs)
        sums = decoder.buffers.left(1, width, each=rows)
        assert isinstance(sums, torch.Tensor)
        piece_sums(inputs.to(device), sums)
        found = launch(decoder, decoder.model.linears[f"layers.0.experts.0.{kind}"], chosen)
        assert found.dec is not None
        own = [weights[f"layers.0.experts.{expert}.{kind}"] for expert in range(read)]
        wanted = torch.stack([inputs[row % rows].float() @ own[row].T for row in range(read)])
        assert_close((found.tensor + found.dec).cpu(), wanted if rows == 1 else wanted.sum(0, keepdim=True), "float32")
