"""Exports, checked by loading them: GGUF by our own reader, the others unpacked by code of this file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.checkpoint import Checkpoint
from models.errors import CancelledError, StoreError, UnsupportedModelError
from models.export import gguf_file
from models.export.export import default_target, export
from models.families import FAMILIES
from models.oracle import Oracle
from models.plain_tokenizer import plain_tokenizer, several
from models.quantize import keeping, quantize
from models.quantizers.dequantize import dequantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from tests.close import Tolerance, assert_close
from tests.models.conftest import TEXT, write_tokenizer
from tests.models.random_models import CASES, LLAMA3_ROPE, longrope, random_model
from tests.models.restored import Restored

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
RTN = Recipe.usual("rtn", bits=4, group_size=32)
FOLDERS = ("awq", "gptq", "compressed-tensors")
Maker = Callable[..., StoredModel]


def write_bpe(folder: Path) -> None:
    """Byte-level BPE as in Qwen2: 256 bytes, merges, and two special tokens, of which one begins texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    from models.gguf.tokenizer import PRE_TOKENIZERS

    (pattern,) = PRE_TOKENIZERS["qwen2"].patterns
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    _save(
        folder,
        tokenizer,
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": several("{{ messages }}", "{{ tools }}")},
    )


def write_sentencepiece(folder: Path) -> None:
    """BPE over characters with bytes for unknown ones, as tokenizer.json holds a sentencepiece model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["▁", *sorted(set("thequickbrownfxjmpsvlazydgPM.!5 \n") - {" "})]
    merges = [("t", "h"), ("▁", "th"), ("e", "r"), ("▁th", "e"), ("o", "x")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens += ["".join(merge) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:3]])
    _save(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def _save(folder: Path, tokenizer: Any, settings: dict[str, str]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a low-bit model of a random one; every one once."""
    made: dict[str, StoredModel] = {}

    def of(family: str, recipe: Recipe = RTN, write: Callable[[Path], None] = write_bpe, **changes: Any) -> StoredModel:
        key = f"{family} {recipe} {write.__name__} {changes}"
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            random_model(family, **{**SIZES, **changes}).save_pretrained(folder / "source")
            write(folder / "source")
            store = Store(folder / "store")
            quantize(folder / "source", store, recipe, name="org/tiny", calibration=TEXT, evaluation=None)
            made[key] = store.open("org/tiny")
        return made[key]

    return of


MINIMA = Tolerance(rtol=2e-3, atol=2e-3, why="minima of Q4_1, and weights as they are read, are of half precision")
EIGHT_BITS = Tolerance(atol=5e-3, why="half a step of 8 bits in blocks whose largest weights are about 1")
GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi4-mini": (
        "Phi3",
        {"rope_parameters": longrope(6, partial_rotary_factor=0.75), "original_max_position_embeddings": 16},
    ),
    "granite": ("Granite", CASES["granite"][1]),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": False}),
}


@pytest.mark.parametrize("residuals", [False, True], ids=["low-bit", "residuals"])
@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_file_comes_back(make: Maker, case: str, residuals: bool, tmp_path: Path) -> None:
    family, changes = GGUF_CASES[case]
    model = make(family, **changes)
    made = export(model, tmp_path / "tiny.gguf", "gguf", residuals=residuals)
    file, expected = Checkpoint.open(made.path), Restored(model, residuals)
    assert made.bytes == made.path.stat().st_size
    assert set(made.weights) == {"F16", "Q8_0" if residuals else "Q4_1"}
    assert torch.equal(file.embedding().float(), expected.embedding())
    for name in model.spec.vector_names():
        assert torch.equal(file.vector(name), expected.vector(name))
    for name in model.spec.linear_names():
        (ours, own_bias), (theirs, their_bias) = expected.linear(name), file.linear(name)
        assert_close(theirs.float(), ours, EIGHT_BITS if residuals else MINIMA, what=name)
        assert (own_bias is None) == (their_bias is None)
        assert own_bias is None or torch.equal(own_bias, their_bias.float())
    tokens = torch.arange(23)[None] * 7 % 300
    logits = Oracle(expected).logits(tokens)
    if not residuals:  # random models make much of half a step of 8 bits
        assert_close(Oracle(file).logits(tokens), logits, Tolerance(spread=0.03, why="half precision, twice"))


@pytest.mark.parametrize("write", [write_bpe, write_sentencepiece])
def test_its_tokenizer_comes_back(make: Maker, write: Callable[[Path], None], tmp_path: Path) -> None:
    model = make("Llama", write=write)
    export(model, tmp_path / "tiny.gguf", "gguf")
    from runtime.text.tokenizer import read_tokenizer

    own, found = plain_tokenizer(model.tokenizer_path), read_tokenizer(tmp_path / "tiny.gguf")
    assert own is not None
    text = "The quick brown fox jumps over the lazy dog, 3 times — naïvely."
    assert found.fast.encode(text).ids == own.fast.encode(text).ids
    assert found.special == own.special
    assert (found.template, found.tool_template) == (own.template, own.tool_template)


def nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of each word of the last axis: int32 [R, W] -> [R, 8 W]; `order[i]` is where nibble i goes."""
    places = sorted(range(8), key=order.__getitem__)
    return torch.stack([words >> (4 * place) & 15 for place in places], -1).flatten(-2)


def unpacked(kind: str, tensors: dict[str, torch.Tensor], version: str | None) -> torch.Tensor:
    """A matrix [N, K] in float32 from a module's tensors, as the format's readers see it."""
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        codes, zeros = (nibbles(tensors[name], order).float() for name in ("qweight", "qzeros"))
        group = len(codes) // len(zeros)
        return ((codes - zeros.repeat_interleave(group, 0)) * tensors["scales"].float().repeat_interleave(group, 0)).T
    if kind == "gptq":
        codes = nibbles(tensors["qweight"].T.contiguous()).T.float()
        zeros = nibbles(tensors["qzeros"]).float() + (version == "gptq")
        own = tensors["g_idx"].long()
        return ((codes - zeros[own]) * tensors["scales"].float()[own]).T
    codes = nibbles(tensors["weight_packed"]).float() - 8
    zeros = nibbles(tensors["weight_zero_point"].T.contiguous()).T.float() - 8
    group = codes.shape[1] // zeros.shape[1]
    assert tensors["weight_shape"].tolist() == list(codes.shape)
    return (codes - zeros.repeat_interleave(group, 1)) * tensors["weight_scale"].float().repeat_interleave(group, 1)


def whole(folder: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State dictionary of an exported folder in float32, and its config.json without the description of weights."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {key: each for name in set(index.values()) for key, each in load_file(folder / name).items()}
    assert stored.keys() == index.keys()
    config = json.loads((folder / "config.json").read_text())
    about = config.pop("quantization_config")
    assert about["quant_method"] == kind
    last = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}[kind]
    modules = {key.rpartition(".")[0] for key in stored if key.endswith(f".{last}")}
    found: dict[str, torch.Tensor] = {}
    for module in modules:
        own = {key.rpartition(".")[2]: stored.pop(key) for key in list(stored) if key.startswith(f"{module}.")}
        found[f"{module}.weight"] = unpacked(kind, own, about.get("checkpoint_format"))
        found |= {f"{module}.bias": own["bias"]} if "bias" in own else {}
    return {key: each.float() for key, each in {**found, **stored}.items()}, config


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_kept_is_the_model_and_is_exported_as_gguf(make: Maker, kind: Any, tmp_path: Path) -> None:
    model, store = make("Qwen2"), Store(tmp_path / "store")
    folder = export(model, tmp_path / "folder", kind).path
    kept = store.open(quantize(folder, store, keeping(folder)).name)
    made = export(kept, tmp_path / "tiny.gguf", "gguf")
    assert set(made.weights) == {"F16", "Q4_1", "Q8_0"}
    for name in model.spec.linear_names():
        own = dequantize(kept.linear(name))
        assert name == "head" or np.array_equal(own, dequantize(model.linear(name)))
        assert_close(Checkpoint.open(made.path).linear(name)[0].float(), own, MINIMA, what=name)
    with pytest.raises(UnsupportedModelError, match="has the weights of its source"):
        export(kept, tmp_path / "again", "awq")


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {"attention_bias": True, "tie_word_embeddings": True}), ("Qwen2", {}), ("Phi3", {})],
    ids=["llama", "qwen2", "phi3"],
)
def test_a_folder_comes_back(make: Maker, family: str, changes: dict[str, Any], kind: Any, tmp_path: Path) -> None:
    import transformers

    model = make(family, **changes)
    export(model, tmp_path / "out", kind)
    state, config = whole(tmp_path / "out", kind)
    expected, read = Restored(model, residuals=False), Checkpoint.open(tmp_path / "out")
    sources = FAMILIES[model.spec.family].sources
    for name in model.spec.linear_names()[:-1]:
        weight, _ = expected.linear(name)
        assert torch.equal(torch.cat([state[f"{module}.weight"] for module in sources(name)]), weight)
        assert torch.equal(read.linear(name)[0], weight)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float().eval()
    theirs.load_state_dict(state)
    tokens = torch.arange(23)[None] * 7 % 300
    with torch.no_grad():
        logits = theirs(tokens).logits
    why = Tolerance(spread=0.01, why="biases and the head's weights are of half precision")
    assert_close(logits, Oracle(expected).logits(tokens), why)
    tokenizer = plain_tokenizer(tmp_path / "out")
    assert tokenizer is not None
    assert tokenizer.template == "{{ messages }}"


@pytest.mark.parametrize(
    "recipe",
    [Recipe.usual("rtn", bits=3, group_size=64), Recipe.usual("qoq", group_size=64), Recipe.usual("qoq", group_size=0)],
    ids=["3-bits-short-groups", "two-levels", "whole-rows"],
)
def test_groups_that_do_not_fit_are_cut(make: Maker, recipe: Recipe, tmp_path: Path) -> None:
    model = make("Llama", recipe)
    made = export(model, tmp_path / "out", "awq")
    state, _ = whole(tmp_path / "out", "awq")
    weight, _ = Restored(model, residuals=False).linear("layers.1.down")  # 96 inputs: 64 and 32
    close = Tolerance(rtol=1e-3, atol=1e-3, why="the product of both scales is of half precision")
    assert_close(state["model.layers.1.mlp.down_proj.weight"], weight, close)
    assert made.notes


@pytest.mark.parametrize("kind", FOLDERS)
def test_residuals_bring_three_bits_nearer(make: Maker, kind: Any, tmp_path: Path) -> None:
    model = make("Llama", Recipe.usual("rtn", bits=3, group_size=32))
    errors = []
    full, _ = Restored(model, residuals=True).linear("layers.0.o")
    for residuals in (False, True):
        export(model, tmp_path / str(residuals), kind, residuals=residuals)
        state, _ = whole(tmp_path / str(residuals), kind)
        errors.append(float((state["model.layers.0.self_attn.o_proj.weight"] - full).square().mean()))
    assert errors[1] < 0.4 * errors[0]


def test_a_zero_point_of_zero_takes_the_second_version_of_gptq(make: Maker, tmp_path: Path) -> None:
    def positive(linear: Any) -> Any:
        zeros = linear.zeros.copy()
        zeros[3, 1] = 0
        return SimpleNamespace(**{name: getattr(linear, name) for name in linear.__slots__} | {"zeros": zeros})

    model = make("Llama")
    export(model, tmp_path / "first", "gptq")
    about = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert about["checkpoint_format"] == "gptq"
    plain = model.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "linear", lambda name: positive(plain(name)) if name == "layers.1.o" else plain(name))
        export(model, tmp_path / "second", "gptq")
    state, _ = whole(tmp_path / "second", "gptq")
    about = json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"]
    assert about["checkpoint_format"] == "gptq_v2"
    expected, _ = Restored(model, residuals=False).linear("layers.0.o")
    assert torch.equal(state["model.layers.0.self_attn.o_proj.weight"], expected)


CODEBOOK = Recipe.usual("squeezellm", bits=3, group_size=32)


def test_a_codebook_becomes_eight_bits(make: Maker, tmp_path: Path) -> None:
    model = make("Llama", CODEBOOK)
    assert set(export(model, tmp_path / "tiny.gguf", "gguf").weights) == {"F16", "Q8_0"}
    weight, _ = Checkpoint.open(tmp_path / "tiny.gguf").linear("layers.0.o")
    assert_close(weight.float(), Restored(model, residuals=False).linear("layers.0.o")[0], EIGHT_BITS)


def test_matrices_that_blocks_do_not_divide_stay_in_16_bits(make: Maker, tmp_path: Path) -> None:
    model = make("Llama", intermediate_size=90)
    export(model, tmp_path / "tiny.gguf", "gguf")
    weight, _ = Checkpoint.open(tmp_path / "tiny.gguf").linear("layers.0.down")
    assert_close(weight.float(), Restored(model, residuals=False).linear("layers.0.down")[0], MINIMA)


FOUR_OUTPUTS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4}
WITHOUT = Recipe.usual("rtn", group_size=32, residual_bits=0)
REFUSED: dict[str, tuple[str, Recipe, dict[str, Any], Any, bool, str]] = {
    "codebook": ("Llama", CODEBOOK, {}, "awq", False, "its codes are not evenly spaced"),
    "width": ("Llama", RTN, {"intermediate_size": 90}, "gptq", False, "its matrices have 64, 90 inputs"),
    "outputs": ("Llama", RTN, FOUR_OUTPUTS, "awq", False, "k_proj has 4 outputs"),
    "multipliers": ("Granite", RTN, CASES["granite"][1], "awq", False, "weights of granite models are rearranged"),
    "family": ("SmolLM3", RTN, {}, "gguf", False, "smollm3 models have no place in it"),
    "windows": ("Qwen2", RTN, CASES["qwen2-window"][1], "gguf", False, "no sliding windows of their own"),
    "biases": ("Qwen3", RTN, {"head_dim": 16, "attention_bias": True}, "gguf", False, "have no biases"),
    "residuals": ("Llama", WITHOUT, {}, "gguf", True, "was quantized without residuals"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_hold_is_refused(make: Maker, case: str, tmp_path: Path) -> None:
    family, recipe, changes, kind, residuals, said = REFUSED[case]
    model = make(family, recipe, **{"num_hidden_layers": 3 if case == "windows" else 2, **changes})
    with pytest.raises((UnsupportedModelError, StoreError), match=said):
        export(model, tmp_path / "out", kind, residuals=residuals)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_a_name_is_refused(make: Maker, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="its tokenizer is of the kind WordLevel"):
        export(make("Llama", write=lambda folder: write_tokenizer(folder, 320)), tmp_path / "out.gguf", "gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["gguf", "awq"])
def test_nothing_half_written_stays(make: Maker, kind: Any, tmp_path: Path) -> None:
    model, asked = make("Llama"), 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    with pytest.raises(CancelledError):
        export(model, tmp_path / "out", kind, cancelled=cancelled)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial").write_text("left by a killed process")
    export(model, tmp_path / "out", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(StoreError, match="out exists; remove it"):
        export(model, tmp_path / "out", kind)


def test_the_usual_names() -> None:
    assert default_target("org/name-gptq-4bit", "gguf") == Path("name-gptq-4bit.gguf")
    assert default_target("name", "compressed-tensors") == Path("name-compressed-tensors")


def test_a_block_of_q4_1() -> None:
    from models.quantizers.groups import GroupCodes

    codes = np.arange(32, dtype=np.uint8)[None] % 16
    groups = GroupCodes(
        codes=codes, scales=np.array([[0.5]], np.float16), zeros=np.array([[3]], np.uint8), group_size=32
    )
    (row,) = gguf_file.q4_1(groups)
    assert row[:4].view(np.float16).tolist() == [0.5, -1.5]
    assert row[4:].tolist() == [17 * code for code in range(16)]


@pytest.mark.data
def test_a_real_model_comes_back(shared_data: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    quantize(shared_data / "models" / "english3m", store, RTN, name="english3m", calibration=TEXT, evaluation=None)
    model = store.open("english3m")
    export(model, tmp_path / "out.gguf", "gguf")
    tokens = torch.arange(50)[None] * 37 % model.spec.vocab_size
    logits = Oracle(Restored(model, residuals=False)).logits(tokens)
    close = Tolerance(spread=0.01, why="minima, and weights as they are read, are of half precision")
    assert_close(Oracle(Checkpoint.open(tmp_path / "out.gguf")).logits(tokens), logits, close)
