"""The full-precision decoder against transformers' own models: random ones of every family, and the real ones."""

from __future__ import annotations

import inspect
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from models.architecture import Builder, Graph
from models.checkpoint import Checkpoint
from models.errors import CheckpointError
from models.families import spec_from_config
from models.oracle import Oracle
from models.quantize.streams import normed
from models.spec import ModelSpec, expert_of
from tests.close import assert_close
from tests.grid import grid
from tests.models.random_models import (
    CASES,
    DELTA,
    DRAWN_FAMILIES,
    GEMMA,
    MECHANISMS,
    MINISTRAL3,
    MIXED,
    SIZES,
    drawn_changes,
    random_case,
    random_model,
    with_mtp,
)

TOLERANCE = 1e-4
"""Largest difference of a logit in fp32. Logits of the random models are of the order of 1."""


of_mechanisms = pytest.mark.parametrize("pair", grid(CASES, MECHANISMS), indirect=True)
"""For tests of what the oracle does with any family."""


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    """A random model of transformers, and the same as read from the folder that transformers wrote."""
    model = random_case(request.param)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return model, Checkpoint.open(folder)


def tokens_of(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=generator)


def theirs(model: Any, tokens: torch.Tensor, cache: DynamicCache | None = None) -> Any:
    """What transformers computes; its releases before 5.24 call the cache ``past_key_values``."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        return model(tokens, use_cache=cache is not None, **{name: cache})


@pytest.mark.parametrize("length", grid([1, 4, 16, 23], {23}))
def test_logits_equal_transformers(pair: tuple[Any, Checkpoint], length: int) -> None:
    model, checkpoint = pair
    expected = theirs(model, tokens_of(length)).logits
    assert expected.std() > 0.3
    assert_close(Oracle(checkpoint).logits(tokens_of(length)), expected, "model")


class DoubleTorch:
    """torch whose float32 is float64: states of transformers' models, which they cast to float32, stay precise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, {"float32": "float64", "float": "float64"}.get(name, name))


@pytest.mark.slow
@pytest.mark.parametrize("family", DRAWN_FAMILIES)
def test_drawn_configurations_equal_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 of each family: a prompt of 5 tokens and 64 more in steps of one and of several, across borders of windows.

    Both in float64, for in float32 the order of a sum, which processors choose, moves some by more than the tolerance.
    """
    for seed in range(50):
        changes = drawn_changes(family, seed)
        model, folder = random_model(family, seed=str(seed), **changes), tmp_path / str(seed)
        model.save_pretrained(folder)
        oracle, tokens = Oracle(Checkpoint.open(folder), torch.float64), tokens_of(69, batch=1)
        cache = oracle.cache(1, 69)
        parts = [oracle.logits(step, cache) for step in tokens.split((5, *[1] * 16, 3, 1, 7, 1, 11, 1, 5, 1, 17, 1), 1)]
        with monkeypatch.context() as changed:
            if oracle.spec.delta is not None:
                changed.setattr(inspect.getmodule(type(model)), "torch", DoubleTorch())
            expected = theirs(model.double(), tokens).logits
        error = (torch.cat(parts, 1) - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE, (seed, changes)


def test_cached_decode_equals_transformers(pair: tuple[Any, Checkpoint]) -> None:
    """Decoded whole and in a cache of its own."""
    model, checkpoint = pair
    tokens, oracle = tokens_of(23), Oracle(checkpoint)
    cache = oracle.cache(2, 23)
    parts = [oracle.logits(step, cache) for step in tokens.split((9, 3, *[1] * 11), 1)]
    assert cache.length == 23
    assert_close(torch.cat(parts, 1), theirs(model, tokens).logits, "model")
    tokens = tokens_of(16)  # within original_context: beyond it, its longrope mixes two sets of frequencies
    cache, cache_of_theirs = oracle.cache(2, 16), DynamicCache(config=model.config)
    for step in tokens.split((3, *[1] * 13), 1):
        assert_close(oracle.logits(step, cache), theirs(model, step, cache_of_theirs).logits, "model")


def test_spec_follows_the_config_of_transformers(pair: tuple[Any, Checkpoint]) -> None:
    model, checkpoint = pair
    spec, config = checkpoint.spec, model.config
    mixers = [getattr(layer, "self_attn", None) or getattr(layer, "mixer", None) for layer in model.model.layers]
    attentions = [mixer for mixer in mixers if hasattr(mixer, "q_proj") or hasattr(mixer, "qkv_proj")]
    window = None if spec.family == "qwen2_moe" else getattr(config, "sliding_window", None)
    windows = [getattr(attention, "sliding_window", window) for attention in attentions]
    everywhere = [getattr(attention, "is_sliding", True) for attention in attentions]
    expected = [own if there else None for own, there in zip(windows, everywhere, strict=True)]
    layers = [layer for layer in range(spec.num_layers) if spec.mixer(layer) in ("attention", "shared", "both")]
    assert [spec.windows[layer] for layer in layers] == expected
    dims = [own.kv_lora_rank + own.qk_rope_head_dim if spec.latent else own.head_dim for own in attentions]
    assert [spec.heads_of(layer).dim for layer in layers] == dims
    if spec.latent is not None:  # what they are multiplied into is larger
        corrections = (own.numel() for name, own in model.named_buffers() if name.endswith("correction_bias"))
        assert spec.parameters == sum(own.numel() for own in model.parameters()) + sum(corrections)
    assert spec.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    eos = config.eos_token_id
    assert spec.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))


def test_older_spelling_of_the_config_means_the_same(pair: tuple[Any, Checkpoint]) -> None:
    _, checkpoint = pair
    if checkpoint.spec.family.startswith(("gemma4", "laguna", "nemotron_h")):
        return  # younger than the other spelling, or nothing rotates
    config = json.loads(checkpoint.files.configuration["config.json"])
    rope = config.pop("rope_parameters")
    local, rope = rope.get("sliding_attention"), dict(rope.get("full_attention", rope))
    if local is not None:
        config["rope_local_base_freq"] = local["rope_theta"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    partial = rope.pop("partial_rotary_factor", None)
    if partial is not None:
        config["partial_rotary_factor"] = partial
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        config["head_dim"] = None
    assert spec_from_config(config) == checkpoint.spec


@pytest.mark.parametrize("case", ["llama3.1", "qwen3", "phi4-mini"])
def test_bfloat16_is_as_good_as_that_of_transformers(case: str, tmp_path: Path) -> None:
    model = random_case(case)
    tokens = tokens_of(23)
    exact = theirs(model, tokens).logits
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.linear("layers.0.qkv")[0].dtype == torch.bfloat16
    ours = Oracle(checkpoint, torch.bfloat16).logits(tokens)
    assert ours.dtype == torch.bfloat16
    error = (ours.float() - exact).square().mean().sqrt()
    error_of_theirs = (theirs(model, tokens).logits.float() - exact).square().mean().sqrt()
    assert 0 < error <= 1.2 * error_of_theirs


def test_bfloat16_norms_are_computed_in_float32(tmp_path: Path) -> None:
    random_case("llama3").to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    seen: dict[str, torch.Tensor] = {}
    Oracle(checkpoint, torch.bfloat16, observe=lambda name, y: seen.update({name: y})).block(0, x)
    scaled = x.double() / (x.double().square().mean(-1, keepdim=True) + checkpoint.spec.norm_eps).sqrt()
    expected = checkpoint.vector("layers.0.input_norm").to(torch.bfloat16) * scaled.to(torch.bfloat16)
    assert (seen["layers.0.qkv"] != expected).double().mean() < 0.01  # float32 may round a tie the other way


@of_mechanisms
def test_one_oracle_goes_from_long_contexts_back_to_short_ones(pair: tuple[Any, Checkpoint]) -> None:
    model, checkpoint = pair
    oracle = Oracle(checkpoint)
    for length in (23, 5, 30):
        expected = theirs(model, tokens_of(length)).logits
        assert_close(oracle.logits(tokens_of(length)), expected, "model")
        assert_close(oracle.logits(tokens_of(length), rows=[2, -1]), expected[:, [2, -1]], "model")


@of_mechanisms
def test_a_cache_can_be_shortened_and_refuses_what_it_has_no_room_for(pair: tuple[Any, Checkpoint]) -> None:
    oracle, tokens = Oracle(pair[1]), tokens_of(12)
    cache = oracle.cache(2, 12)
    oracle.logits(tokens[:, :5], cache)
    oracle.logits(tokens[:, :4], cache)
    cache.length = 5
    with pytest.raises(ValueError, match="does not fit a cache of 12"):
        oracle.logits(tokens[:, :8], cache)
    assert cache.length == 5
    again = oracle.logits(tokens[:, 5:], cache)
    fresh = oracle.cache(2, 12)
    oracle.logits(tokens[:, :5], fresh)
    assert_close(again, oracle.logits(tokens[:, 5:], fresh), "rounding")


def test_observer_sees_what_modules_of_transformers_receive(pair: tuple[Any, Checkpoint]) -> None:
    model, checkpoint = pair
    seen: list[tuple[str, torch.Tensor]] = []
    expected: dict[str, torch.Tensor] = {}
    modules, spec, family = {}, checkpoint.spec, checkpoint.files.family
    if spec.family == "falcon_h1":
        return  # what multiplies its inputs is part of weights here
    seen_alone: set[str] = set()
    router = "block_sparse_moe.router" if spec.family.startswith("granitemoe") else family.routers[0]
    for name in spec.linear_names():
        layer = None if name == "head" else int(name.split(".")[1])
        if name.endswith("tokens.gate_up"):
            continue  # one module for all blocks
        if layer is None or expert_of(name) is None:
            modules[family.sources(name, "attention" if layer is None else spec.mixer(layer))[0]] = name
        elif spec.mixture is not None and spec.mixture.parallel_mlp:
            seen_alone.add(f"layers.{layer}.router")  # its module reads another norm than the experts
        else:
            modules[f"model.layers.{layer}.{router}"] = f"layers.{layer}.router"
    for ours, stored in family.renamed.items() if spec.family == "lfm2_moe" else ():
        modules = {
            module.replace(stored, ours).replace(stored.rstrip("."), ours.rstrip(".")): name
            for module, name in modules.items()
        }
    if spec.family == "nemotron_h":
        modules = {checkpoint.files.own_name(f"{module}.").rstrip("."): name for module, name in modules.items()}
    if spec.family == "granitemoehybrid":
        theirs_of = {"mlp.gate_proj": "shared_mlp.input_linear"}
        theirs_of["mlp.down_proj"] = "shared_mlp.output_linear"
        for ours, stored in theirs_of.items():
            modules = {module.replace(ours, stored): name for module, name in modules.items()}
    hooks = [
        model.get_submodule(module).register_forward_pre_hook(
            lambda _, arguments, name=name: expected.update({name: arguments[0]})
        )
        for module, name in modules.items()
    ]
    theirs(model, tokens_of(6))
    for hook in hooks:
        hook.remove()
    Oracle(checkpoint, observe=lambda name, x: seen.append((name, x))).logits(tokens_of(6))
    if spec.norm_after:
        behind = sum(spec.norms(layer)[1] for layer in range(spec.num_layers))
        further = spec.token_width or (spec.mixture is not None and spec.mixture.parallel_mlp)
        norms = 6 if spec.altup is not None else 4 if further else 2
        assert sum(name.endswith("_norm") for name, _ in seen) == norms * behind
        seen = [(name, x) for name, x in seen if not name.endswith("_norm")]
    context = [(name, x) for name, x in seen if name.endswith("tokens.gate_up")]
    seen = [(name, x) for name, x in seen if not name.endswith("tokens.gate_up") and name not in seen_alone]
    assert [name for name, _ in seen if expert_of(name) is None] == list(modules.values())
    for _, x in context:
        assert_close(x, Oracle(checkpoint).embed(tokens_of(6))[..., : spec.hidden_size])
    for name in expected:
        if name.endswith("inner.gate_up"):  # our stream is divided by this
            scale = checkpoint.files.multipliers.get("inner.gate_up")
            if scale is None:
                scale = model.model.layers[int(name.split(".")[1])].altup.correct_output_scale
            expected[name] = expected[name] / scale
        if "spread" in name:  # and these read the table
            expected[name] = expected[name] / spec.hidden_size**0.5
    expected["head"] = expected["head"] * checkpoint.files.multipliers.get("norm", 1.0)
    for name, x in seen:
        of_latents = spec.latent is not None and name.endswith(".o")  # theirs have passed W_V, which is part of our `o`
        if expert_of(name) is None and not of_latents:
            assert_close(x, expected[name].view_as(x), "model")


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "glm4-flash", "nemotron-h-moe"])
def test_a_block_that_predicts_further_tokens_is_a_model_of_its_own(case: str, tmp_path: Path) -> None:
    """DeepSeek-V3 §2.2: x = M [RMSNorm(Emb(t + 1)); RMSNorm(h)] passes one block."""
    model, block = with_mtp(tmp_path, case)
    checkpoint = Checkpoint.open(tmp_path)
    assert_close(Oracle(checkpoint).logits(tokens_of(5)), theirs(model, tokens_of(5)).logits, "model")
    mtp = checkpoint.mtp()
    assert mtp is not None
    x = torch.randn(2, 7, mtp.spec.hidden_size)
    with torch.no_grad():
        expected = block.model(inputs_embeds=x).last_hidden_state
    assert_close(normed(Oracle(mtp).block(0, x), mtp.vector("norm"), mtp.spec.norm_eps), expected, "model")
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (join,) = (tensor for name, tensor in held.items() if name.endswith(("mtp.fc.weight", "eh_proj.weight")))
    assert torch.equal(mtp.linear("layers.0.join.down")[0], join)
    offset = checkpoint.files.norm_offset
    for ours, ends in (("embed_norm", ("norm_embedding", "enorm")), ("hidden_norm", ("norm_hidden", "hnorm"))):
        (own,) = (tensor for name, tensor in held.items() if name.endswith(tuple(f"{end}.weight" for end in ends)))
        assert torch.equal(mtp.vector(f"layers.0.{ours}"), own + offset)


def test_blocks_further_on_do_not_belong(tmp_path: Path) -> None:
    random_case("glm4-moe").save_pretrained(tmp_path)
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    foreign = {"model.layers.4.eh_proj.weight": torch.ones(4, 8)}
    safetensors.torch.save_file(held | foreign, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.eh_proj.*does not belong"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe-dense"])
def test_experts_are_shown_the_rows_that_were_routed_to_them(case: str, tmp_path: Path) -> None:
    random_case(case).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    mixture, routed = checkpoint.spec.mixture, dict[str, int]()
    assert mixture is not None
    whole = torch.empty(0)

    def observe(name: str, x: torch.Tensor) -> None:
        nonlocal whole
        if name.endswith("router"):
            whole = x.flatten(0, 1)
        elif name.endswith("gate_up") and oracle.rows is not None:
            routed[name] = len(x)
            torch.testing.assert_close(x, whole[oracle.rows.places])

    oracle = Oracle(checkpoint, observe=observe)
    oracle.logits(tokens_of(9))
    blocks = sum(map(checkpoint.spec.has_experts, range(checkpoint.spec.num_layers)))
    assert sum(routed.values()) == blocks * 2 * 9 * mixture.chosen
    assert set(routed) <= set(checkpoint.spec.linear_names())


def test_the_keys_shown_are_those_that_transformers_caches(pair: tuple[Any, Checkpoint]) -> None:
    model, checkpoint = pair
    seen: list[tuple[int, torch.Tensor]] = []
    Oracle(checkpoint, observe_keys=lambda layer, _, keys: seen.append((layer, keys))).logits(tokens_of(3))
    cache = DynamicCache(config=model.config)
    theirs(model, tokens_of(3), cache)
    assert tuple(layer for layer, _ in seen) == checkpoint.spec.attention_layers
    kinds = getattr(model.config, "layers_block_type", ())
    places = [at for at, kind in enumerate(kinds) if kind.endswith("attention")] or range(checkpoint.spec.num_layers)
    for layer, keys in seen:
        rope, order = checkpoint.spec.rope_of(layer), torch.arange(checkpoint.spec.heads_of(layer).dim)
        turning = 0 if rope is None else rope.rotary_dim
        if checkpoint.files.family.interleaved:  # here, halves of a head rotate with each other
            order[:turning] = order[:turning].view(-1, 2).T.flatten()
        if checkpoint.files.family.proportional:  # here, the pairs that rotate come first
            pairs = order.view(2, -1)
            order = torch.cat((pairs[:, : turning // 2].flatten(), pairs[:, turning // 2 :].flatten()))
        held = cache.layers[places[layer]].keys
        if checkpoint.spec.family == "falcon_h1":  # what multiplies keys does queries here
            held = held / (model.config.key_multiplier * model.config.attention_in_multiplier)
        if checkpoint.spec.latent is not None:  # they keep what rotates apart, and a latent times its norm's weight
            turned = cache.layers[layer].values
            if checkpoint.spec.family == "deepseek_v2":
                turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
            held = torch.cat((turned, held / model.model.layers[layer].self_attn.kv_a_layernorm.weight), -1)
        assert_close(keys, held[..., order], "model")


class SpiedWeights:
    """A checkpoint that remembers which tensors it gave out and which of them are still alive."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.given: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def _give(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self.given.append((name, weakref.ref(copy)))
        return copy

    def vector(self, name: str) -> torch.Tensor:
        return self._give(name, self.checkpoint.vector(name))

    def token_rows(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        return self.checkpoint.token_rows(tokens, layer)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.checkpoint.linear(name)
        return self._give(name, weight), bias

    def embedding(self) -> torch.Tensor:
        return self._give("embed", self.checkpoint.embedding())

    def alive(self) -> set[str]:
        return {name for name, tensor in self.given if tensor() is not None}


@of_mechanisms
def test_block_by_block_holds_one_block_and_gives_the_same_logits(pair: tuple[Any, Checkpoint]) -> None:
    _, checkpoint = pair
    weights = SpiedWeights(checkpoint)
    oracle = Oracle(weights, resident=False)
    batches = [tokens_of(length) for length in (5, 9, 1)]
    states = [oracle.embed(tokens) for tokens in batches]
    for layer in range(checkpoint.spec.num_layers):
        states = [oracle.block(layer, x, torch.arange(x.shape[1])) for x in states]
        assert {".".join(name.split(".")[:2]) for name in weights.alive()} == {f"layers.{layer}"}
        assert len({expert_of(name) for name in weights.alive()} - {None}) <= 1, "one expert at a time"
    for tokens, x in zip(batches, states, strict=True):
        assert_close(oracle.head(x), Oracle(checkpoint).logits(tokens))
    blocks = [name for name, _ in weights.given if name.startswith("layers.") and expert_of(name) is None]
    assert len(blocks) == len(set(blocks)), "a block's weights are read once for all batches"


@of_mechanisms
def test_resident_weights_are_read_once(pair: tuple[Any, Checkpoint]) -> None:
    weights = SpiedWeights(pair[1])
    oracle = Oracle(weights)
    oracle.logits(tokens_of(3))
    once = [name for name, _ in weights.given if expert_of(name) is None]
    oracle.logits(tokens_of(4))
    assert [name for name, _ in weights.given if expert_of(name) is None] == once
    given = [name for name, _ in weights.given if name.startswith("layers.")]
    assert len(given) == len(set(given))


@pytest.mark.parametrize("case", ["llama3", "llama3.2"])
def test_head_converted_in_parts_gives_the_same_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_case(case).to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    expected = Oracle(checkpoint).logits(tokens_of(5))
    monkeypatch.setattr("models.oracle._HEAD_ROWS", 16)
    ours = Oracle(checkpoint, resident=False).logits(tokens_of(5))
    assert_close(ours, expected)


@of_mechanisms
def test_block_depends_on_distances_of_positions_alone(pair: tuple[Any, Checkpoint]) -> None:
    oracle = Oracle(pair[1])
    x = oracle.embed(tokens_of(9))
    near, far = (oracle.block(1, x, torch.arange(9) + start) for start in (20, 40))
    spec = oracle.spec
    if spec.query_growth or (spec.qk_norm and spec.qk_norm_form == "after_rope"):  # in some families, on more than that
        assert (near - far).abs().max() > 0.1
        return
    C = oracle.spec.hidden_size  # keys that pass to other blocks are rotated
    assert_close(near[..., :C], far[..., :C], "model")


def greedy(oracle: Oracle, prompt: list[int], count: int) -> list[int]:
    """The prompt and `count` tokens after it, each the most likely one."""
    cache = oracle.cache(1, len(prompt) + count)
    ids = list(prompt)
    fresh = ids
    for _ in range(count):
        logits = oracle.logits(torch.tensor([fresh]), cache, rows=[-1])
        fresh = [int(logits[0, -1].argmax())]
        ids += fresh
    return ids


def encode(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def prompt_of(folder: Path, expected: dict[str, Any]) -> list[int]:
    return expected.get("prompt_ids") or encode(folder, expected["prompt"])


@pytest.fixture(params=["english3m", "stories260k", "babyllama105"])
def real(request: pytest.FixtureRequest, shared_data: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a real model and what independent code computed from it."""
    folder = shared_data / "models" / request.param
    return folder, json.loads((folder / "expected.json").read_text())


@pytest.mark.data
def test_real_model_continues_like_transformers_for_200_tokens(real: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = real
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = prompt_of(folder, expected)
    theirs_ids = list(prompt)
    cache = DynamicCache(config=model.config)
    output = theirs(model, torch.tensor([prompt]), cache)
    for _ in range(200):
        theirs_ids.append(int(output.logits[0, -1].argmax()))
        fresh = torch.tensor([theirs_ids[-1:]])
        output = theirs(model, fresh, cache)
    ours = greedy(Oracle(Checkpoint.open(folder)), prompt, 200)
    assert ours == theirs_ids
    assert len(set(ours)) > 20


@pytest.mark.data
def test_real_model_agrees_with_independent_code(real: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = real
    oracle = Oracle(Checkpoint.open(folder))
    prompt, ids = prompt_of(folder, expected), expected["greedy_ids"]
    count = len(ids) if ids[: len(prompt)] != prompt else len(ids) - len(prompt)
    assert greedy(oracle, prompt, count)[-len(ids) :] == ids
    if "score_ids" in expected:
        tokens = torch.tensor([expected["score_ids"]])
        logits = oracle.logits(tokens)[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
        assert loss.item() == pytest.approx(expected["mean_nll"], abs=1e-5)
        assert logits[-1, :8].tolist() == pytest.approx(expected["last_logits_first8"], abs=1e-4)


@pytest.mark.data
@pytest.mark.parametrize("text", ["wikitext2-test.txt", "tinystories.txt"])
def test_real_model_has_the_perplexity_independent_code_found(shared_data: Path, text: str) -> None:
    folder = shared_data / "models" / "english3m"
    expected = json.loads((folder / "expected.json").read_text())
    key = "perplexity (window 256, stride 128, first 4000 tokens, fp32 arithmetic on the bf16 weights)"
    beginning = (shared_data / "text" / text).read_text(encoding="utf-8")[:60000]
    ids = encode(folder, beginning)[:4000]
    assert len(ids) == 4000
    oracle = Oracle(Checkpoint.open(folder))
    total, scored = 0.0, 1
    for start in range(0, len(ids), 128):
        window = torch.tensor([ids[start : start + 256]])
        losses = torch.nn.functional.cross_entropy(oracle.logits(window)[0, :-1], window[0, 1:], reduction="none")
        total += losses[scored - start - 1 :].double().sum().item()
        scored = start + window.shape[1]
        if scored == len(ids):
            break
    assert math.exp(total / (len(ids) - 1)) == pytest.approx(expected[key][text], rel=1e-4)


def multimodal(family: str) -> Any:
    """A random model of transformers that sees pictures, too."""
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    if family == "Gemma3":
        text = transformers.Gemma3TextConfig(**{**SIZES, **GEMMA, "layer_types": MIXED})
        parts = {"vision_config": transformers.SiglipVisionConfig(**vision), "mm_tokens_per_image": 4}
        config = transformers.Gemma3Config(text_config=text, **parts, image_token_index=66)
        return transformers.Gemma3ForConditionalGeneration(config).eval()
    if family == "Gemma4":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        own = {**SIZES, **CASES["gemma4-shared"][1]}
        parts = {"vision_config": {**sizes, "num_key_value_heads": 2, "head_dim": 8}, "audio_config": None}
        return transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=own, **parts)).eval()
    if family == "MuseGlimmer":
        text = transformers.MuseGlimmerTextConfig(**{**SIZES, **CASES["muse-glimmer"][1]})
        parts = {"vision_config": vision, "out_hidden_size": 8, "projector_hidden_size": 8}
        whole = transformers.MuseGlimmerConfig(text_config=text, **parts)
        return transformers.MuseGlimmerForConditionalGeneration(whole).eval()
    if family == "Qwen3_5":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
        return transformers.Qwen3_5ForConditionalGeneration(
            transformers.Qwen3_5Config(text_config={**SIZES, **DELTA, "num_hidden_layers": 4}, vision_config=sizes)
        ).eval()
    text = transformers.Ministral3Config(**{**SIZES, "head_dim": 16, "rope_parameters": MINISTRAL3})
    parts = {"vision_config": transformers.PixtralVisionConfig(**vision, head_dim=8), "image_token_index": 66}
    return transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(text_config=text, **parts)).eval()


@pytest.mark.parametrize("older", [False, True], ids=["as-saved", "older-names"])
@pytest.mark.parametrize("family", ["Gemma3", "Gemma4", "Mistral3", "Qwen3_5", "MuseGlimmer"])
def test_the_text_part_of_a_multimodal_checkpoint_loads_by_itself(family: str, older: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = multimodal(family)
    model.save_pretrained(tmp_path)
    if older:
        tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
        named = {name.replace("model.language_model.", "language_model.model."): x for name, x in tensors.items()}
        named = {f"language_model.{name}" if name.startswith("lm_head") else name: x for name, x in named.items()}
        safetensors.torch.save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.spec.family in (
        *("gemma3_text", "gemma4_text", "ministral3", "qwen3_5_text", "muse_glimmer_text"),
    )
    tokens = tokens_of(20) % 60
    assert_close(Oracle(checkpoint).logits(tokens), theirs(model, tokens).logits, "model")


def test_the_text_part_of_gemma_3n_loads_by_itself(tmp_path: Path) -> None:
    """Its pictures need a package that is not here, so names are given: the text part's, and another to leave out."""
    model = random_case("gemma3n")
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): x for name, x in stored.items()}
    named["model.vision_tower.timm_model.blocks.0.weight"] = torch.zeros(2)
    safetensors.torch.save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert_close(Oracle(Checkpoint.open(tmp_path)).logits(tokens_of(20)), theirs(model, tokens_of(20)).logits, "model")


class GivenWeights:
    """Weights by their names."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, Any]) -> None:
        self.spec = spec
        self.tensors = tensors

    def vector(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.tensors[name]

    def embedding(self) -> torch.Tensor:
        raise NotImplementedError


def test_sinks_are_those_of_gpt_oss() -> None:
    """Attention alone, without the norm before it: the rest of the block is a mixture of experts."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    layers = {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention"] * 3, "num_local_experts": 2}
    config = GptOssConfig(**{**SIZES, **layers}, attn_implementation="eager")
    module, x = GptOssAttention(config, 0).eval(), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    distance = torch.arange(9)[:, None] - torch.arange(9)
    mask = torch.where((distance >= 0) & (distance < 4), 0.0, -torch.inf)[None, None]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 1.0 if parameter.ndim == 1 else 0.3)
        expected, _ = module(x, GptOssRotaryEmbedding(config)(x, torch.arange(9)[None]), mask)
    llama = {**SIZES, "architectures": ["LlamaForCausalLM"], "head_dim": 16, "attention_bias": True}
    read = spec_from_config({**llama, "rope_parameters": config.rope_parameters})
    spec = replace(read, windows=(4,) * 3, sinks=True, norm_before=False)
    q, k, v, o = (getattr(module, f"{name}_proj") for name in "qkvo")
    qkv = tuple(torch.cat([getattr(part, what) for part in (q, k, v)]) for what in ("weight", "bias"))
    tensors = {"layers.0.qkv": qkv, "layers.0.o": (o.weight, o.bias), "layers.0.sinks": module.sinks}
    operations, made = Oracle(GivenWeights(spec, tensors))._operations(torch.arange(9), None), Builder(spec)
    made.mix(0, made.node("enter"))
    operations.stream = x
    with torch.inference_mode():
        assert_close(operations.run(Graph.of(made.nodes)) - x, expected, "model")
