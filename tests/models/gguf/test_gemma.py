"""Gemma 3 270M, a real model of a family with a SentencePiece vocabulary, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from models.checkpoint import Checkpoint
from models.oracle import Oracle
from runtime.text.tokenizer import Tokenizer
from tests.models.gguf.lines import mixed_lines

pytestmark = pytest.mark.data


def theirs(file: Path) -> Any:
    """transformers' model of the file's weights, which gguf dequantizes and names."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = gguf.GGUFReader(file)
    weights = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    sizes = {key.removeprefix("gemma3."): field.contents() for key, field in reader.fields.items()}
    config = Gemma3TextConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=sizes["embedding_length"],
        intermediate_size=sizes["feed_forward_length"],
        num_hidden_layers=sizes["block_count"],
        num_attention_heads=sizes["attention.head_count"],
        num_key_value_heads=sizes["attention.head_count_kv"],
        head_dim=sizes["attention.key_length"],
        query_pre_attn_scalar=sizes["attention.key_length"],
        sliding_window=sizes["attention.sliding_window"],
    )
    model = Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for key, parameter in model.named_parameters():
        name = names.get_name(key, try_suffixes=(".weight",))
        own = torch.tensor(weights[str(name)].reshape(parameter.shape))
        parameter.data.copy_(own - 1 if "norm" in key else own.half())  # files have 1 + w
    return model


@pytest.mark.slow
def test_tokens_are_those_of_transformers(gemma: Path, shared_data: Path) -> None:
    from transformers import AutoTokenizer

    original = AutoTokenizer.from_pretrained(gemma.parent, gguf_file=gemma.name)
    prose = (shared_data / "text" / "wikitext2-test.txt").read_text("utf-8")
    ours = Tokenizer(gemma)
    for line in mixed_lines(2000, prose):
        assert ours.encode(line) == original(line)["input_ids"], repr(line)


@pytest.mark.slow
def test_logits_and_an_answer_are_those_of_transformers(gemma: Path) -> None:
    checkpoint = Checkpoint.open(gemma)
    text = Tokenizer(gemma).encode("The capital of France is the capital of the country of France. It is the largest")
    found = Oracle(checkpoint, resident=False).logits(torch.tensor([text]))[0]
    with torch.no_grad():
        expected = theirs(gemma)(torch.tensor([text])).logits[0]
    assert text[0] == checkpoint.spec.bos_token_id
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.std())
    assert found[5:-1].argmax(-1).tolist() == text[6:], "what follows the fifth word is its greedy answer"
