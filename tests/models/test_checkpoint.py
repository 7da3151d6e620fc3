"""Reading Hugging Face checkpoints: names, fusing, laziness, and one clear error for each way one can be broken."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from models.checkpoint import Checkpoint
from models.errors import CheckpointError, ModelError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}
Q = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def write_config(folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write(folder: Path, held: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A checkpoint in one file."""
    write_config(folder, **changes)
    save_file(held, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, held: dict[str, torch.Tensor]) -> Path:
    """A checkpoint in two files and an index."""
    write_config(folder)
    names = sorted(held)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[:5], names[5:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: held[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def error_of(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("writer", [write, write_sharded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_come_under_the_names_of_the_architecture(
    writer: Callable[[Path, dict[str, torch.Tensor]], Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    held = tensors(dtype)
    checkpoint = Checkpoint.open(writer(tmp_path / "model", held))
    block = "model.layers.0."
    parts = {
        "layers.0.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "layers.0.o": ["self_attn.o_proj"],
        "layers.0.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "layers.0.down": ["mlp.down_proj"],
    }
    for name, modules in parts.items():
        weight, bias = checkpoint.linear(name)
        assert weight.dtype == dtype
        assert tuple(weight.shape) == checkpoint.spec.linear_shape(name.split(".")[-1])
        assert torch.equal(weight, torch.cat([held[f"{block}{module}.weight"] for module in modules]))
        assert bias is None
    assert torch.equal(checkpoint.linear("head")[0], held["lm_head.weight"])
    assert torch.equal(checkpoint.embedding(), held[EMBED])
    norms = {"layers.0.input_norm": "layers.0.input_layernorm", "norm": "norm"}
    for name, module in norms.items():
        assert checkpoint.vector(name).dtype == torch.float32
        assert torch.equal(checkpoint.vector(name), held[f"model.{module}.weight"].float())


@pytest.mark.parametrize("begin", ["", "transformer.", "module.model.", "_orig_mod.model.", "base_model.model.model."])
@pytest.mark.parametrize("headless", [False, True], ids=["head", "headless"])
def test_names_may_begin_otherwise(begin: str, headless: bool, tmp_path: Path) -> None:
    """Models that were saved without their head, as those for embeddings are, or by a program that wraps them."""
    outside = begin.removesuffix("model.") if begin.endswith("model.") else ""
    held = {
        f"{begin}{name.removeprefix('model.')}" if name.startswith("model.") else f"{outside}{name}": tensor
        for name, tensor in tensors().items()
        if not (headless and name.startswith("lm_head"))
    }
    folder = write(tmp_path / "model", held, architectures=["LlamaModel" if headless else "LlamaForCausalLM"])
    checkpoint, head = Checkpoint.open(folder), EMBED if headless else "lm_head.weight"
    assert checkpoint.spec.tied == headless
    assert torch.equal(checkpoint.linear("head")[0], tensors()[head])
    assert torch.equal(checkpoint.linear("layers.0.o")[0], tensors()["model.layers.0.self_attn.o_proj.weight"])


def test_biases_are_fused_like_the_weights(tmp_path: Path) -> None:
    held = tensors(torch.bfloat16)
    for name, rows in {"q": 8, "k": 4, "v": 4}.items():
        held[f"model.layers.0.self_attn.{name}_proj.bias"] = torch.randn(rows).to(torch.bfloat16)
    changes = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    checkpoint = Checkpoint.open(write(tmp_path, held, **changes))
    _, bias = checkpoint.linear("layers.0.qkv")
    assert bias is not None
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.cat([held[f"model.layers.0.self_attn.{x}_proj.bias"].float() for x in "qkv"]))
    assert checkpoint.linear("layers.0.o")[1] is None


def test_generation_config_joins_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "bos_token_id": 1}')
    spec = Checkpoint.open(tmp_path).spec
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))


@pytest.mark.parametrize("stored", ["table", "head", "both"])
def test_tied_head_is_the_embedding(stored: str, tmp_path: Path) -> None:
    held = tensors()
    table = held.pop(EMBED)
    held.pop("lm_head.weight")
    if stored != "head":
        held[EMBED] = table
    if stored != "table":
        held["lm_head.weight"] = table.clone()
    checkpoint = Checkpoint.open(write(tmp_path, held, tie_word_embeddings=True))
    assert checkpoint.spec.tied
    assert torch.equal(checkpoint.linear("head")[0], table)
    assert torch.equal(checkpoint.embedding(), table)


def test_a_stored_head_wins_over_a_tied_config_and_a_single_file_over_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, {name: tensor * 2 for name, tensor in tensors().items()})
    held = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # of old checkpoints
    checkpoint = Checkpoint.open(write(tmp_path, held, tie_word_embeddings=True))
    assert not checkpoint.spec.tied
    assert torch.equal(checkpoint.linear("head")[0], held["lm_head.weight"])
    assert torch.equal(checkpoint.embedding(), held[EMBED])
    assert [shard.name for shard in checkpoint.files.weights] == ["model.safetensors"]


def test_linked_files_of_a_download_cache_are_read(tmp_path: Path) -> None:
    held = tensors()
    write(tmp_path / "blobs", held)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(tmp_path / "blobs" / name)
    assert torch.equal(Checkpoint.open(snapshot).embedding(), held[EMBED])


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    vocabulary = 10_000_000
    write_config(tmp_path, vocab_size=vocabulary, tie_word_embeddings=True)
    held = {name: tensor for name, tensor in tensors().items() if name not in (EMBED, "lm_head.weight")}
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in held.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    header[EMBED] = {"dtype": "F32", "shape": [vocabulary, 8], "data_offsets": [end, end + vocabulary * 32]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in held.values():
            file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(text) + end + vocabulary * 32)  # 320 MB that take no room on the disk
    before = psutil.Process().memory_info().rss
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.vector("norm"), held["model.norm.weight"])
    assert torch.equal(checkpoint.linear("layers.0.o")[0], held["model.layers.0.self_attn.o_proj.weight"])
    assert psutil.Process().memory_info().rss - before < 100e6


class Trickle(io.FileIO):
    """A file that gives a few bytes at a time, as the system does with more than 2 GB."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:7]) or 0


def test_tensor_that_arrives_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tensors()
    checkpoint = Checkpoint.open(write(tmp_path, held))
    monkeypatch.setattr("models.shard.open_file", Trickle)
    assert torch.equal(checkpoint.embedding(), held[EMBED])


def test_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, tensors()))
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends within the tensor"):
        checkpoint.linear("layers.0.qkv")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        checkpoint.vector("norm")


INDEX, WEIGHTS, SECOND = "model.safetensors.index.json", "model.safetensors", "model-00002-of-00002.safetensors"
NESTED = "[" * 100_000


def written(name: str, text: str | bytes, *, sharded: bool = False) -> Callable[[Path], object]:
    """Makes a checkpoint with something else in one of its files."""

    def make(folder: Path) -> None:
        (write_sharded if sharded else write)(folder, tensors())
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode("latin-1"))

    return make


def endless(folder: Path) -> None:
    write(folder, tensors())
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk


def indexed(name: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        write_config(folder)
        (folder / INDEX).write_text(json.dumps({"weight_map": {EMBED: name}}))

    return make


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: write(folder, tensors() | {name: tensor})


def two_models(folder: Path) -> None:
    held = tensors().items()
    write(folder, {f"{part}.{name.removeprefix('model.')}": own.clone() for name, own in held for part in "ab"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: None, "no such folder"),
    "no config": (lambda folder: (folder.mkdir(), save_file(tensors(), folder / WEIGHTS)), "config.json: there is no"),
    **{
        f"config {text[:20]!r}": (written("config.json", text), "config.json is damaged")
        for text in (
            *(
                "",
                "{",
                "[1]",
                "\x00\xff",
                '{"a": }',
                NESTED,
                '{"a":' * 100_000,
                '{"a": "\\ud800"}',
                "9" * 9999,
            ),
        )
    },
    "endless config": (endless, "it has more than 32 MiB"),
    "nested generation config": (
        written("generation_config.json", NESTED),
        "generation_config.json is damaged: it is not a JSON file (it is nested too deeply)",
    ),
    "a key less": (
        lambda folder: write(folder, tensors(), rms_norm_eps=None),
        "'rms_norm_eps' is missing",
    ),
    "another architecture": (
        lambda folder: write(folder, tensors(), architectures=["BloomForCausalLM"], model_type="bloom"),
        "BloomForCausalLM",
    ),
    "a shard less": (
        lambda folder: (write_sharded(folder, tensors()) / SECOND).unlink(),
        f"1 of 2 shards are missing: {SECOND}. Download the rest",
    ),
    **{
        f"index {text[:20]!r}": (written(INDEX, text, sharded=True), "index.json is damaged")
        for text in ("{}", '{"weight_map": []}', "not json", '{"weight_map":' + NESTED)
    },
    **{
        f"index of {name!r}": (indexed(name), "not a safetensors file beside it")
        for name in ("../model.safetensors", "/etc/passwd", "weights.bin", "..", 3)
    },
    "index of other shards": (
        lambda folder: save_file({"lm_head.weight": torch.ones(10, 8)}, write_sharded(folder, tensors()) / SECOND),
        "'model.layers.0.mlp.up_proj.weight' is missing",
    ),
    **{
        f"weights {content[:20]!r}": (written(WEIGHTS, content), "not a safetensors file")
        for content in (b"<!DOCTYPE html><html>", b"\xff" * 100, b"PK\x03\x04" * 50, b"\x08" + b"\0" * 30)
    },
    "git lfs": (
        written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:00"),
        "git lfs pull",
    ),
    "integers": (with_tensor(Q, torch.ones(8, 8, dtype=torch.int8)), "q_proj.weight' is stored as I8"),
    **{
        name: (
            with_tensor(f"model.layers.{name}", torch.zeros(8)),
            f"'model.layers.{name}' does not belong in a llama model",
        )
        for name in ("0.self_attn.q_proj.bias", "0.self_attn.q_proj.qzeros", "1.input_layernorm.weight")
    },
    "two models": (two_models, "'model.embed_tokens.weight' is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(case: str, tmp_path: Path) -> None:
    make, words = BROKEN[case]
    make(tmp_path / "model")
    assert words in error_of(tmp_path / "model")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_what_is_no_file_is_not_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    write(tmp_path, tensors())
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    place = tmp_path / name
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    assert f"{place} cannot be read" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "there are no weights"),
        (["pytorch_model.bin"], "pickled (pytorch_model.bin)"),
        (["consolidated.00.pth", "pytorch_model.pt"], "pickled"),
        (["model-Q4_K_M.gguf"], "GGUF"),
        (["consolidated.safetensors"], "neither model.safetensors nor"),
        (["model-00001-of-00002.safetensors"], "neither model.safetensors nor"),
    ],
)
def test_weights_are_absent_or_foreign(files: list[str], words: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x02")
    message = error_of(tmp_path)
    assert words in message
    assert "safetensors" in message


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.6, 0.999])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_truncated_file(share: float, sharded: bool, tmp_path: Path) -> None:
    (write_sharded if sharded else write)(tmp_path, tensors())
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    message = error_of(tmp_path)
    assert f"{file} is damaged, truncated or not a safetensors file" in message
    assert "Download the model again" in message


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    held = tensors()
    held[name] = torch.zeros(*held[name].shape[:-1], held[name].shape[-1] + 1)
    message = error_of(write(tmp_path, held))
    assert f"'{name}' has shape" in message
    assert "model.safetensors" in message
    del held[name]
    message = error_of(write(tmp_path, held))
    assert f"'{name}' is missing" in message
    assert ("tie_word_embeddings" in message) == (name == "lm_head.weight")
