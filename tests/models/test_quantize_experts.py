"""Quantizing mixtures of experts: statistics, the fallback of experts that few tokens reach, resuming, memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import CancelledError, CheckpointError, QuantizationError
from models.oracle import Oracle
from models.quantize import calibration, for_checkpoint, quantize
from models.quantizers import trellis
from models.quantizers.dequantize import dequantize
from models.quantizers.groups import rtn
from models.recipe import Recipe, chosen_method
from models.shard import ShardTensor
from models.store import Store
from models.store.layout import block_file, expert_tokens, file_tensors, sizes, tensor_files
from models.store.tensors import MappedTensors
from tests.models.conftest import TEXT, write_tokenizer
from tests.models.random_models import MIXTURE, SIZES, random_case, random_model
from tests.models.test_quantize_memory import MEASURE

GPTQ = Recipe(method="gptq", bits=4, group_size=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of three blocks, the first of them dense, with six experts of which a token has three."""
    folder = tmp_path_factory.mktemp("mixture")
    random_model("Qwen3Moe", **{**MIXTURE, "decoder_sparse_step": 1, "mlp_only_layers": [0]}).save_pretrained(folder)
    write_tokenizer(folder, SIZES["vocab_size"])
    return folder


def test_factors_of_experts_are_read_once_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_case("gemma4-experts").save_pretrained(tmp_path)
    checkpoint, read = Checkpoint.open(tmp_path), ShardTensor.read
    names: list[str] = []

    def noted(tensor: ShardTensor) -> torch.Tensor:
        names.append(tensor.name)
        return read(tensor)

    monkeypatch.setattr(ShardTensor, "read", noted)
    for name in checkpoint.spec.linear_names():
        checkpoint.linear(name)
    assert len([name for name in names if name.endswith("per_expert_scale")]) == checkpoint.spec.num_layers


def plainly(weight: np.ndarray[Any, Any], recipe: Recipe) -> Any:
    """A matrix quantized without second moments."""
    if recipe.trellis:
        return trellis.quantize(weight, 4, trellis.feedback(np.eye(weight.shape[1], dtype=np.float32)))
    return rtn(weight, 4, 32)


@pytest.mark.parametrize("recipe", [GPTQ, Recipe(method="trellis", bits=4)], ids=lambda recipe: recipe.method)
def test_an_expert_that_few_tokens_reach_is_rounded_plainly(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """The limit lies between the experts, so that some are and others are not; the model says how many."""
    store = Store(tmp_path)
    quantize(checkpoint, store, recipe, name="usual", calibration=TEXT, evaluation=TEXT)
    tokens = MappedTensors(store.open("usual").path / block_file(1))[expert_tokens(1)]
    assert tokens.sum() == 3 * 688  # each of the text's tokens has three experts
    limit = int(np.sort(tokens)[2])
    monkeypatch.setattr(calibration, "FEWEST_TOKENS", limit)
    monkeypatch.setattr("models.quantize.quality.FEWEST_TOKENS", limit)
    info = quantize(checkpoint, store, recipe, name="few", calibration=TEXT, evaluation=TEXT)
    every = np.concatenate([MappedTensors(info.path / block_file(layer))[expert_tokens(layer)] for layer in (1, 2)])
    assert info.summary.warning is not None
    assert f"{np.count_nonzero(every < limit)} of 12 experts" in info.summary.warning
    model, source = store.open("few"), Checkpoint.open(checkpoint)
    for expert, count in enumerate(tokens):
        name = f"layers.1.experts.{expert}.gate_up"
        weight = source.linear(name)[0].numpy()
        plain = np.array_equal(dequantize(model.linear(name)), plainly(weight, recipe).dequantize())
        assert plain == (count < limit)


def test_experts_share_the_choice_of_channels_of_what_they_all_read(checkpoint: Path, tmp_path: Path) -> None:
    info = quantize(checkpoint, Store(tmp_path), GPTQ, name="m", calibration=TEXT, evaluation=TEXT)
    model, source = Store(tmp_path).open("m"), Checkpoint.open(checkpoint)
    seen: dict[str, torch.Tensor] = {}
    tokens = torch.tensor([[1, *range(3, 40)]])
    Oracle(source, observe=seen.__setitem__).logits(tokens)
    assert seen["layers.1.router"].shape == (1, 38, 32)
    for kind, width in (("gate_up", 32), ("down", 20)):
        linears = [model.linear(f"layers.1.experts.{expert}.{kind}") for expert in range(6)]
        for linear in linears:
            assert linear.rank_maximum is not None
            assert linear.rank_maximum.shape == (width,)
            np.testing.assert_array_equal(linear.rank_maximum, linears[0].rank_maximum)
        same = [np.array_equal(linear.mean_square, linears[0].mean_square) for linear in linears]
        assert all(same) if kind == "gate_up" else not any(same[1:])
    assert info.summary.active_bytes is not None
    assert info.summary.active_bytes < info.summary.gpu_bytes
    assert model.vector("layers.1.router").shape == (6, 32)


def test_every_token_reaches_a_shared_expert(tmp_path: Path) -> None:
    changes = {**MIXTURE, "num_hidden_layers": 2, "shared_expert_intermediate_size": 40}
    random_model("Qwen2Moe", **changes).save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder", SIZES["vocab_size"])
    store = Store(tmp_path / "store")
    quantize(tmp_path / "folder", store, GPTQ, name="m", calibration=TEXT, evaluation=TEXT)
    model = store.open("m")
    tokens = MappedTensors(model.path / block_file(1))[expert_tokens(1)]
    assert tokens[:6].sum() == 3 * 688
    assert tokens[6:].tolist() == [688, 688]
    shares = [model.spec.share_read(f"layers.1.experts.{expert}.down") for expert in range(8)]
    assert shares == [0.5] * 6 + [1.0] * 2
    whole, part = model.linear("layers.1.experts.6.down"), model.linear("layers.1.experts.7.down")
    assert whole.shape == part.shape == (32, 20)
    stored = [file_tensors(model.spec, model.recipe, file) for file in tensor_files(model.spec)]
    bytes_of = {name: kind.itemsize * math.prod(shape) for each in stored for name, (kind, shape) in each.items()}
    sized = sizes(model.spec, model.recipe)
    assert sized.residuals == sum(size for name, size in bytes_of.items() if name.endswith(".residual"))
    apart = ("residual", "rank_maximum", "mean_square")
    expert = [name for name in bytes_of if name.startswith("layers.1.experts.0.") and not name.endswith(apart)]
    assert sized.device - sized.active == 3 * sum(map(bytes_of.__getitem__, expert)), "half of six experts"


def test_an_interrupted_run_makes_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    whole, cut = Store(tmp_path / "whole"), Store(tmp_path / "cut")
    quantize(checkpoint, whole, GPTQ, name="m", calibration=TEXT, evaluation=TEXT)
    blocks: list[float] = []

    def stop() -> bool:
        return len(blocks) > 0 and blocks[-1] > 1.5

    def note(report: Any) -> None:
        if report.phase == "quantize":
            blocks.append(report.done)

    with pytest.raises(CancelledError):
        quantize(checkpoint, cut, GPTQ, name="m", calibration=TEXT, evaluation=TEXT, progress=note, cancelled=stop)
    quantize(checkpoint, cut, GPTQ, name="m", calibration=TEXT, evaluation=TEXT)
    for path in whole.open("m").path.iterdir():
        assert path.read_bytes() == (cut.open("m").path / path.name).read_bytes(), path.name


def test_auto_takes_uniform_codes_for_latent_attention_alone(checkpoint: Path, tmp_path: Path) -> None:
    chosen = Recipe(method=chosen_method("auto"), bits=3)
    assert chosen.trellis
    assert for_checkpoint(chosen, checkpoint) == chosen
    random_case("deepseek-v2").save_pretrained(tmp_path)
    assert for_checkpoint(chosen, tmp_path) == Recipe(method="gptq", bits=3)
    assert chosen_method("auto", 128) == "gptq"
    assert chosen_method("rtn") == "rtn"


@pytest.mark.parametrize("method", ["awq", "squeezellm", "qoq"])
def test_methods_that_do_not_know_experts_are_refused(checkpoint: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(QuantizationError, match=f"{method} does not quantize mixtures.*trellis, gptq or rtn"):
        quantize(checkpoint, Store(tmp_path), Recipe.usual(method), calibration=TEXT, evaluation=TEXT)


def test_experts_of_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    """Both forms give the same; a tensor with an expert too few is named."""
    from safetensors.torch import load_file, save_file

    model = random_model("Qwen3Moe", **MIXTURE, num_hidden_layers=2)
    model.save_pretrained(tmp_path / "each")
    tensors = load_file(tmp_path / "each" / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefix = "model.layers.1.mlp.experts"

    def stack(module: str) -> torch.Tensor:
        return torch.stack([tensors[f"{prefix}.{expert}.{module}.weight"] for expert in range(6)])

    stacked[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
    stacked[f"{prefix}.down_proj"] = stack("down_proj")
    folder = tmp_path / "stacked"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "each" / "config.json").read_bytes())
    save_file(stacked, folder / "model.safetensors")
    each, all_of_them = Checkpoint.open(tmp_path / "each"), Checkpoint.open(folder)
    for name in each.spec.linear_names():
        assert torch.equal(each.linear(name)[0], all_of_them.linear(name)[0])
    stacked[f"{prefix}.down_proj"] = stacked[f"{prefix}.down_proj"][:5].contiguous()
    save_file(stacked, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj\.weight' is missing"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(("width", "said"), [(40, r"shared_expert\.down_proj\.weight' is missing"), (30, "a multiple")])
def test_a_shared_expert_that_is_wrong(tmp_path: Path, width: int, said: str) -> None:
    from safetensors.torch import load_file, save_file

    model = random_model("Qwen2Moe", **{**MIXTURE, "num_hidden_layers": 2, "shared_expert_intermediate_size": width})
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.shared_expert.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_the_peak_grows_by_packed_experts_alone(tmp_path: Path) -> None:
    """64 experts of 1.3 million weights beside 8 of them, in the same process.

    Codes and residuals of 4 bits with their scales are 1.3 bytes a weight, and the allocator keeps some between them.
    Experts held in float32 would add 4. What oneDNN compiles for every shape, and there is one for each number of
    tokens that reach an expert, is not counted: 1.6 more on a processor with AMX, none on others.
    """
    folders = {"few": 8, "many": 64}
    for name, count in folders.items():
        changes = {"num_experts": count, "hidden_size": 512, "moe_intermediate_size": 852, "num_hidden_layers": 2}
        changes |= {"decoder_sparse_step": 1, "max_position_embeddings": 512}
        model = random_model("Qwen3Moe", **{**MIXTURE, **changes})
        model.to(torch.bfloat16).save_pretrained(tmp_path / name, max_shard_size="30MB")
        write_tokenizer(tmp_path / name, SIZES["vocab_size"])
    (tmp_path / "text").write_text(TEXT)
    arguments = [str(tmp_path / "many"), str(tmp_path / "store"), str(tmp_path / "text"), "gptq", str(tmp_path / "few")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    few, many = json.loads(done.stdout)
    assert many - few <= 2.8 * (folders["many"] - folders["few"]) * 3 * 512 * 852
