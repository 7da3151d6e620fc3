"""Checkpoints that are quantized already: each form beside a folder with the same weights in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models import low_bit_source
from models.checkpoint import Checkpoint
from models.errors import CheckpointError, QuantizationError, UnsupportedModelError
from models.experts import Part
from models.export.export import export
from models.quantize import keeping, kept_by_default, quantize
from models.quantizers.dequantize import dequantize
from models.recipe import Recipe
from models.shard import StoredTensor
from models.store import Store
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.linear import dequantize as dequantize_torch
from runtime.backends.reference.decoder import ReferenceDecoder
from tests.close import Tolerance, assert_close
from tests.grid import grid
from tests.models.conftest import TEXT, write_tokenizer
from tests.models.kept import check_logits
from tests.models.random_models import random_model
from tests.runtime.backends.triton.interpreter import DEVICE, patched_once

GROUP = 32
Tensors = dict[str, torch.Tensor]
Encoder = Callable[[torch.Generator, int, int], tuple[Tensors, torch.Tensor]]
"""Makes the tensors of a random matrix [N, K], and the matrix."""


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, L] as words [R, ceil(L * bits / 32)]: each row is one long number, the first code lowest."""
    words = -(-codes.shape[1] * bits // 32)
    rows = [sum(code << bits * at for at, code in enumerate(row)) for row in codes.tolist()]
    split = [[row >> 32 * at & 0xFFFFFFFF for at in range(words)] for row in rows]
    return torch.tensor([[word - (word >> 31 << 32) for word in row] for row in split], dtype=torch.int32)


def integers(random: torch.Generator, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=random)


def scales_of(random: torch.Generator, groups: int, rows: int) -> torch.Tensor:
    return (torch.rand(groups, rows, generator=random) / 50 + 0.01).half()


def gptq(bits: int, version: str, *, shuffled: bool) -> tuple[Encoder, dict[str, Any]]:
    def encode(random: torch.Generator, rows: int, width: int) -> tuple[Tensors, torch.Tensor]:
        codes = integers(random, (width, rows), 0, 1 << bits)
        less_one = version == "gptq"
        zeros = integers(random, (width // GROUP, rows), 1, (1 << bits) + less_one)
        scales, of = scales_of(random, width // GROUP, rows), torch.arange(width) // GROUP
        if shuffled:
            of = of[torch.randperm(width, generator=random)]
        tensors = {
            "qweight": stream(codes.T, bits).T.contiguous(),
            "qzeros": stream(zeros - int(less_one), bits),
            "scales": scales,
        }
        tensors |= {"g_idx": of.int()} if shuffled else {}
        return tensors, ((codes.float() - zeros.float()[of]) * scales.float()[of]).T

    return encode, {"quant_method": "gptq", "bits": bits, "checkpoint_format": version, "group_size": GROUP}


def awq() -> tuple[Encoder, dict[str, Any]]:
    def in_eights(codes: torch.Tensor) -> torch.Tensor:
        return stream(codes.view(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    def encode(random: torch.Generator, rows: int, width: int) -> tuple[Tensors, torch.Tensor]:
        codes, zeros = (integers(random, (count, rows), 0, 16) for count in (width, width // GROUP))
        scales, of = scales_of(random, width // GROUP, rows), torch.arange(width) // GROUP
        tensors = {"qweight": in_eights(codes), "qzeros": in_eights(zeros), "scales": scales}
        return tensors, ((codes - zeros[of]) * scales.float()[of]).T

    return encode, {"quant_method": "awq", "bits": 4, "group_size": GROUP}


def compressed(bits: int, *, symmetric: bool, groups: bool) -> tuple[Encoder, dict[str, Any]]:
    def encode(random: torch.Generator, rows: int, width: int) -> tuple[Tensors, torch.Tensor]:
        half, count = 1 << bits - 1, width // GROUP if groups else 1
        codes, scales = integers(random, (rows, width), -half, half), scales_of(random, rows, count)
        zeros = integers(random, (rows, count), -half, half) * (not symmetric)
        tensors = {
            "weight_packed": stream(codes + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, width]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = stream((zeros + half).T, bits).T.contiguous()
        of = torch.arange(width) // (width // count)
        return tensors, (codes - zeros[:, of]).float() * scales.float()[:, of]

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if groups else "channel"}
    about = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return encode, {**about, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def floats(scale: str, block: list[int] | None, about: dict[str, Any]) -> tuple[Encoder, dict[str, Any]]:
    def encode(random: torch.Generator, rows: int, width: int) -> tuple[Tensors, torch.Tensor]:
        weight = (torch.randn(rows, width, generator=random) * 3).to(torch.float8_e4m3fn)
        high, wide = block or [rows if scale == "weight_scale_inv" else 1, width]
        scales = torch.rand(-(-rows // high), -(-width // wide), generator=random) / 50
        row, column = torch.arange(rows) // high, torch.arange(width) // wide
        if scale == "weight_scale_inv" and block is None:
            scales, of = scales.flatten()[0], scales.flatten()[0]
        else:
            of = scales[row][:, column]
        return {"weight": weight, scale: scales, "input_scale": torch.ones(1)}, weight.float() * of

    return encode, about


ROW_FLOATS = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
FORMS: dict[str, tuple[Encoder, dict[str, Any]]] = {
    "awq": awq(),
    "gptq-4": gptq(4, "gptq", shuffled=False),
    "gptq-4-shuffled": gptq(4, "gptq", shuffled=True),
    "gptq-3": gptq(3, "gptq", shuffled=False),
    "gptq-3-shuffled": gptq(3, "gptq_v2", shuffled=True),
    "gptq-2": gptq(2, "gptq", shuffled=False),
    "gptq-8": gptq(8, "gptq", shuffled=True),
    "compressed-4": compressed(4, symmetric=True, groups=True),
    "compressed-4-zeros": compressed(4, symmetric=False, groups=True),
    "compressed-8-channels": compressed(8, symmetric=True, groups=False),
    "fp8-blocks": floats("weight_scale_inv", [24, 32], {"quant_method": "fp8", "weight_block_size": [24, 32]}),
    "fp8-wide": floats("weight_scale_inv", [64, 128], {"quant_method": "fp8", "weight_block_size": [64, 128]}),
    "fp8-matrix": floats("weight_scale_inv", None, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-rows": floats("weight_scale", None, {"quant_method": "compressed-tensors", "config_groups": ROW_FLOATS}),
}


def write(folder: Path, form: str, family: str = "Qwen2", **changes: Any) -> tuple[Path, Path]:
    """Two folders with one random model: its blocks' matrices in a form, and in float32."""
    encode, about = FORMS[form]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": False}
    model = random_model(family, **{**sizes, **changes})
    plain, low = folder / "plain", folder / "low"
    model.save_pretrained(plain)
    write_tokenizer(plain, model.config.vocab_size)
    tensors, random = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(7)
    quantized: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = tensor
            continue
        parts, tensors[name] = encode(random, *tensor.shape)
        quantized |= {f"{name.removesuffix('weight')}{last}": part for last, part in parts.items()}
    low.mkdir()
    for path in plain.iterdir():
        (low / path.name).write_bytes(path.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (low / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors")
    save_file(quantized, low / "model.safetensors")
    return plain, low


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_the_weights_that_it_holds(form: str, tmp_path: Path) -> None:
    plain, low = map(Checkpoint.open, write(tmp_path, form))
    assert low.spec == plain.spec
    for name in plain.spec.linear_names():
        (weight, bias), (expected, own) = low.linear(name), plain.linear(name)
        assert torch.equal(weight, expected), name
        assert bias is None if own is None else torch.equal(bias, own)
    assert low.files.types is not None
    first, *others = low.files.types
    assert first.split()[0].lower().startswith(form.split("-")[0])
    assert others == ["F32"]
    entry = low.files.entries["model.layers.1.mlp.down_proj.weight"]
    whole = entry.read()
    assert torch.equal(columns(entry.rows(3, 9)).read(), whole[3:12, 40:60])


KEPT_FORMS = ("awq", "gptq-4", "gptq-3", "compressed-4", "compressed-4-zeros")


@pytest.mark.parametrize("form", KEPT_FORMS)
def test_integers_are_kept_bit_for_bit(form: str, tmp_path: Path) -> None:
    plain, low = write(tmp_path, form)
    recipe = kept_by_default(low)
    assert recipe is not None
    assert recipe.group_size == GROUP
    stored = Store(tmp_path / "store").open(quantize(low, Store(tmp_path / "store"), recipe).name)
    assert stored.info.summary.warning == "the output head, F32 in the source, is rounded to 8 bits"
    for name in stored.spec.linear_names():
        (expected, bias), linear = Checkpoint.open(plain).linear(name), stored.linear(name)
        assert bias is None or np.array_equal(np.asarray(linear.bias), bias.numpy())
        assert name == "head" or np.array_equal(dequantize(linear), expected.numpy()), name


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {*KEPT_FORMS}))
def test_what_cannot_be_kept_is_named(form: str, tmp_path: Path) -> None:
    _, low = write(tmp_path, form)
    assert kept_by_default(low) is None
    why = "int4 in groups of scattered inputs" if form == "gptq-4-shuffled" else ""
    with pytest.raises(QuantizationError, match=rf"layers\.0\.qkv cannot be kept as they are \(.*{why}"):
        keeping(low)


WIDE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.mark.parametrize("form", ["fp8-wide", "fp8-matrix", "fp8-rows"])
@pytest.mark.parametrize("experts", grid([False, True], {False}))
def test_floating_point_numbers_of_8_bits_are_kept_bit_for_bit(form: str, experts: bool, tmp_path: Path) -> None:
    routed = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128} if experts else {}
    plain, low = write(tmp_path, form, "Qwen3Moe" if experts else "Qwen2", **WIDE, **routed)
    assert kept_by_default(low) is None
    recipe, store = keeping(low), Store(tmp_path / "store")
    stored = store.open(quantize(low, store, recipe).name)
    assert {kind for name, kind in (stored.recipe.types or {}).items() if name != "head"} == {"FP8"}
    for name in stored.spec.linear_names():
        linear, expected = stored.linear(name), Checkpoint.open(plain).linear(name)[0].numpy()
        assert name == "head" or np.array_equal(dequantize(linear), expected), name
        assert name == "head" or np.array_equal(dequantize_torch(linear).numpy(), expected), name
    check_logits(stored)
    with pytest.raises(UnsupportedModelError, match="has the weights"):
        export(stored, tmp_path / "again.gguf", "gguf")


def test_floating_point_numbers_that_cannot_be_kept(tmp_path: Path) -> None:
    _, low = write(tmp_path, "fp8-blocks", **WIDE)
    with pytest.raises(QuantizationError, match="FP8 in blocks of 32 inputs"):
        keeping(low)
    tensors = load_file(low / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            tensors[name] = tensor.float().to(torch.float8_e5m2)
    save_file(tensors, low / "model.safetensors")
    with pytest.raises(QuantizationError, match="FP8 as F8_E5M2"):
        keeping(low)
    other = tmp_path / "other"
    other.mkdir()
    _, low = write(other, "fp8-wide", **WIDE)
    tensors = load_file(low / "model.safetensors")
    tensors[f"{O}.weight"].view(torch.uint8)[3, 5] = 255
    save_file(tensors, low / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weights or scales of .*o_proj\.weight' are NaN or infinite"):
        quantize(low, Store(other / "store"), keeping(low))


def test_scales_must_be_numbers_of_half_precision(tmp_path: Path) -> None:
    def change(tensors: Tensors, value: float) -> None:
        name = "model.layers.0.self_attn.q_proj.scales"
        tensors[name] = tensors[name].float()
        tensors[name][0, 0] = value

    fine, beyond, damaged = (tmp_path / name for name in ("fine", "beyond", "damaged"))
    for folder, value in ((fine, 2.0), (beyond, 0.1)):
        folder.mkdir()
        spoiled(folder, lambda tensors, _about, value=value: change(tensors, value))
    assert kept_by_default(fine / "low") is not None
    with pytest.raises(QuantizationError, match="GPTQ int4 with scales beyond half precision"):
        keeping(beyond / "low")
    damaged.mkdir()
    name = "model.layers.0.self_attn.q_proj.scales"
    low = spoiled(damaged, lambda tensors, _about: tensors[name].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"scales of .*q_proj\.qweight' are NaN or infinite"):
        quantize(low, Store(tmp_path / "store"), keeping(low))


def test_groups_of_different_sizes_are_not_kept(tmp_path: Path) -> None:
    def change(tensors: Tensors, _about: dict[str, Any]) -> None:
        for last in ("scales", "qzeros"):
            tensors[f"{O}.{last}"] = tensors[f"{O}.{last}"][::2].contiguous()

    low = spoiled(tmp_path, change)
    assert kept_by_default(low) is None
    with pytest.raises(QuantizationError, match="groups of 32 and 64 inputs cannot be kept in one model"):
        keeping(low)


def test_experts_are_kept(tmp_path: Path) -> None:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    plain, low = write(tmp_path, "awq", "Qwen3Moe", **experts)
    recipe, store = kept_by_default(low), Store(tmp_path / "store")
    assert recipe is not None
    stored = store.open(quantize(low, store, recipe).name)
    for name in stored.spec.linear_names():
        linear, expected = stored.linear(name), Checkpoint.open(plain).linear(name)[0].numpy()
        assert name == "head" or np.array_equal(dequantize(linear), expected), name
    check_logits(stored)
    with patched_once():
        from runtime.backends.triton.decoder import TritonDecoder

        options, tokens = DecoderOptions(context=64, max_rows=16, kv="fp16"), np.arange(3, 6)
        decoders = ReferenceDecoder(stored, options), TritonDecoder(stored, options, DEVICE)
        expected, found = (decoder.forward(Step.of(tokens)) for decoder in decoders)
        assert np.sqrt(np.mean((expected - found) ** 2)) < 0.005 * expected.std()
        decoders[1].close()


def test_a_model_made_of_it_is_that_of_the_weights(tmp_path: Path) -> None:
    plain, low = write(tmp_path, "compressed-4-zeros")
    store, recipe = Store(tmp_path / "store"), Recipe.usual("rtn", bits=3, group_size=32)
    for name, folder in (("plain", plain), ("low", low)):
        quantize(folder, store, recipe, name=name, calibration=TEXT, evaluation=TEXT)
    made, expected = store.open("low"), store.open("plain")
    for path in expected.path.glob("*.safetensors"):
        assert (made.path / path.name).read_bytes() == path.read_bytes(), path.name
    info, other = store.info("low"), store.info("plain")
    assert info.source_types is not None
    assert next(iter(info.source_types)) == "compressed-tensors int4"
    note = "made of compressed-tensors int4 weights: residuals restore those, not the model before they were quantized"
    assert info.summary.warning == (f"{other.summary.warning}; {note}" if other.summary.warning else note)


def spoiled(folder: Path, change: Callable[[Tensors, dict[str, Any]], object], form: str = "gptq-4") -> Path:
    """A folder of a form with changed tensors or configuration."""
    _, low = write(folder, form)
    tensors, config = load_file(low / "model.safetensors"), json.loads((low / "config.json").read_text())
    change(tensors, config["quantization_config"])
    (low / "config.json").write_text(json.dumps(config))
    save_file(tensors, low / "model.safetensors")
    return low


def columns(tensor: StoredTensor) -> StoredTensor:
    """Columns 40 to 59."""
    return Part(tensor=tensor, shape=(tensor.shape[0], 20), inputs=slice(40, 60))


O = "model.layers.1.self_attn.o_proj"
CT = {"quant_method": "compressed-tensors"}
ODD: list[dict[str, Any]] = [{"type": ["int"], "num_bits": 4}, {"type": "int", "num_bits": {}}, {"num_bits": 4}]
WRONG: dict[str, tuple[Callable[[Tensors, dict[str, Any]], object], str]] = {
    "lacks": (lambda tensors, _: tensors.pop(f"{O}.scales"), r"o_proj.qweight' has no 'scales' beside it"),
    "shape": (lambda tensors, _: tensors.update({f"{O}.scales": torch.ones(3, 3)}), r"contradict each other.*\[3, 3\]"),
    "type": (lambda tensors, _: tensors.update({f"{O}.qzeros": torch.ones(2, 8)}), r"stored as F32 \(GPTQ int4 has"),
    "bits": (lambda _, about: about.update(bits=5), r"GPTQ of 5 bits .*cannot be read .*2, 3, 4 and 8 bits"),
    "version": (lambda _, about: about.update(checkpoint_format="marlin"), "in the format 'marlin' cannot be read"),
    "awq": (lambda _, about: about.update(quant_method="awq", version="gemv"), "AWQ of 4 bits in the version 'gemv'"),
    "method": (lambda _, about: about.update(quant_method="bitsandbytes"), "'bitsandbytes'.*fp8, mxfp4, awq, gptq"),
    "no method": (lambda _, about: about.pop("quant_method"), "method 'unknown'"),
    "groups": (lambda _, about: about.update(quant_method="compressed-tensors"), "config_groups"),
    **{
        f"groups {number}": (
            lambda _, about, own=own: about.update(CT, config_groups=own),
            "'config_groups' is .*but must",
        )
        for number, own in enumerate(
            [[1], {"a": 3}, {"a": None}, {"a": {"weights": [1]}}, *({"a": {"weights": own}} for own in ODD)]
        )
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    change, said = WRONG[case]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        Checkpoint.open(spoiled(tmp_path, change))


def test_groups_of_inputs_are_as_many_as_the_inputs(tmp_path: Path) -> None:
    form = next(name for name in FORMS if name.startswith("compressed"))

    def change(tensors: Tensors, _about: dict[str, Any]) -> None:
        tensors[f"{O}.weight_g_idx"] = torch.zeros(65, dtype=torch.int32)

    with pytest.raises(CheckpointError, match=r"contradict each other .*weight_g_idx \[65\]"):
        Checkpoint.open(spoiled(tmp_path, change, form))


def test_a_block_is_no_larger_than_its_matrix() -> None:
    """Whatever config.json says: scales are repeated for as many channels as there are."""
    for block in ((10**12, 1), (1, 10**12)):
        scales = torch.full([2 if block[0] == 1 else 1, 1 if block[0] == 1 else 4], 3.0)
        whole = low_bit_source._scaled({"weight": torch.ones(3, 4)[:2], "weight_scale": scales}, block)
        assert whole.tolist() == [[3.0] * 4] * 2


@pytest.mark.parametrize("group", [-1, 9])
def test_a_group_that_there_is_not(group: int, tmp_path: Path) -> None:
    def change(tensors: Tensors, _about: dict[str, Any]) -> None:
        tensors[f"{O}.g_idx"] = torch.full((64,), group, dtype=torch.int32)

    with pytest.raises(CheckpointError, match=r"groups of '.*o_proj.qweight' are damaged"):
        Checkpoint.open(spoiled(tmp_path, change)).linear("layers.1.o")


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """A gpt-oss with the experts that transformers makes of random MXFP4 tensors, and with these tensors."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2}
    plain, low = folder / "plain", folder / "low"
    random_model("GptOss", **sizes, num_hidden_layers=2).save_pretrained(plain)
    tensors, random = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(7)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, rows = tensors[name].shape
        blocks = integers(random, (experts, rows, width // 32, 16), 0, 256).to(torch.uint8)
        scales = integers(random, (experts, rows, width // 32), 118, 126).to(torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32).contiguous()
    low.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (low / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    save_file(tensors, plain / "model.safetensors")
    save_file(packed, low / "model.safetensors")
    return plain, low


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    plain, low = map(Checkpoint.open, write_gpt_oss(tmp_path))
    for name in plain.spec.linear_names():
        (weight, bias), (expected, own) = low.linear(name), plain.linear(name)
        assert torch.equal(weight.float(), expected), name
        assert bias is None if own is None else torch.equal(bias, own)
    assert low.files.types is not None
    assert next(iter(low.files.types)) == "MXFP4"
    entry = low.files.entries["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(columns(entry.rows(3, 9)).read(), entry.read()[3:12, 40:60])
    entry = plain.files.entries["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(columns(entry.rows(3, 9)).read(), entry.read()[3:12, 40:60])


def test_experts_in_mxfp4_are_kept(tmp_path: Path) -> None:
    """What is not low-bit in the source is rounded to 8 bits."""
    plain, low = write_gpt_oss(tmp_path)
    write_tokenizer(low, 67)
    recipe, store = kept_by_default(low), Store(tmp_path / "store")
    assert recipe is not None
    stored = store.open(quantize(low, store, recipe).name)
    note = "5 matrices beside the experts, F32 in the source, are rounded to 8 bits"
    assert (stored.info.summary.warning, stored.recipe.bits) == (note, 4)
    for name in stored.spec.linear_names():
        linear, (expected, bias) = stored.linear(name), Checkpoint.open(plain).linear(name)
        assert linear.floats == (".experts." in name)
        assert not linear.floats or np.array_equal(dequantize(linear), expected.numpy()), name
        assert_close(dequantize(linear), expected, Tolerance(why="8 bits", span=0.5 / 127 + 2**-11))
        assert bias is None or np.array_equal(np.asarray(linear.bias), bias.numpy())
    check_logits(stored)
    tensors = load_file(low / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(tensors, low / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"scales of .*experts\.down_proj_blocks' are no numbers"):
        quantize(low, store, keeping(low), name="damaged")


@pytest.mark.parametrize("change", ["absent", "short", "type"])
def test_damaged_mxfp4(change: str, tmp_path: Path) -> None:
    _, low = write_gpt_oss(tmp_path)
    tensors, name = load_file(low / "model.safetensors"), "model.layers.0.mlp.experts.down_proj_scales"
    changed = {"short": tensors[name][:, :5].contiguous(), "type": tensors[name].int()}
    del tensors[name]
    save_file(tensors if change == "absent" else {**tensors, name: changed[change]}, low / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks' .*Download the model again"):
        Checkpoint.open(low)
