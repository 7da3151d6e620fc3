"""Tokenizers of GGUF files: token for token those of the tokenizers that the files were made from."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Fast

from models.errors import CheckpointError, UnsupportedModelError
from models.gguf.header import read_header
from models.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_files
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import Tool
from tests.models.gguf.lines import mixed_lines
from tests.models.gguf.making import add, finish

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write(path: Path, texts: Sequence[str], types: Sequence[int], **values: Any) -> Path:
    """A file without weights: `values` are keys after `tokenizer.ggml.`, with two underscores whole ones."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", list(texts))
    writer.add_array("tokenizer.ggml.token_type", list(types))
    for key, value in values.items():
        add(writer, key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}", value)
    writer.add_tensor("t", np.zeros(1, np.float32))
    finish(writer)
    return path


def bytes_of_gpt2() -> list[str]:
    """The 256 characters that stand for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_bytes(path: Path, pre: str | None = "gpt-2", **values: Any) -> Path:
    """Byte-level BPE with one merge, and <s>, </s>."""
    tokens = ["<s>", "</s>", *bytes_of_gpt2(), "th"]
    types = [CONTROL, CONTROL] + [NORMAL] * 257
    defaults = {"model": "gpt2", "pre": pre, "merges": ["t h"], "bos_token_id": 0, "eos_token_id": 1}
    return write(path, tokens, types, **{**defaults, **values})


def same(file: Path, encode: Callable[[str], list[int]], lines: Sequence[str]) -> None:
    tokenizer = Tokenizer(file)
    for line in lines:
        assert tokenizer.encode(line) == encode(line), repr(line)


@pytest.mark.data
def test_smollm2_on_ten_thousand_lines(smollm2_gguf: Path, smollm2_hf: Path, shared_data: Path) -> None:
    prose = (shared_data / "text" / "wikitext2-test.txt").read_text("utf-8")
    original = Fast.from_file(str(smollm2_hf / "tokenizer.json"))
    lines = mixed_lines(10_000, prose)
    assert len(set(lines)) == 10_000
    same(smollm2_gguf, lambda line: original.encode(line).ids, lines)


@pytest.mark.data
def test_smollm2_chats_as_the_folder_does(smollm2_gguf: Path, smollm2_hf: Path) -> None:
    ours, theirs = Tokenizer(smollm2_gguf), Tokenizer(smollm2_hf)
    messages = [{"role": "user", "content": "Hello 🙂"}, {"role": "assistant", "content": "Hi"}]
    assert ours.chat(messages[:1]) == theirs.chat(messages[:1])
    assert ours.chat(messages, continue_final=True) == theirs.chat(messages, continue_final=True)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (1, 2, 49152)


@pytest.mark.data
@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("qwen2.5", "qwen2")])
def test_byte_level_of_real_models(name: str, pre: str, shared_data: Path, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    source = shared_data / "tokenizers" / name
    kind: Any = GPT2Tokenizer if name == "gpt2" else Qwen2Tokenizer
    original = kind(vocab=str(source / "vocab.json"), merges=str(source / "merges.txt"))
    vocabulary = json.loads((source / "vocab.json").read_text("utf-8"))
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = set(original.all_special_tokens)
    extra = [token for token in special if token not in vocabulary]
    types = [CONTROL if token in special else NORMAL for token in [*tokens, *extra]]
    lines = (source / "merges.txt").read_text("utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    file = write(tmp_path / "file.gguf", [*tokens, *extra], types, model="gpt2", pre=pre, merges=merges)
    prose = (shared_data / "text" / "alice.md").read_text("utf-8")
    same(
        file,
        lambda line: original.backend_tokenizer.encode(line, add_special_tokens=False).ids,
        mixed_lines(3000, prose),
    )


@pytest.mark.data
@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece_s_bpe(name: str, shared_data: Path, tmp_path: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(shared_data / "tokenizers" / "mistral" / name))
    file = write_sentencepiece(tmp_path / "file.gguf", original, model="llama")
    prose = (shared_data / "text" / "alice.md").read_text("utf-8")
    # Only a chat template writes control tokens; SentencePiece reads their names in a text as text.
    control = [original.id_to_piece(index) for index in range(original.get_piece_size()) if original.is_control(index)]
    lines = [line for line in mixed_lines(2000, prose) if not any(piece in line for piece in control)]
    same(file, lambda line: [1, *original.encode(line)], lines)
    tokenizer = Tokenizer(file)
    for line in lines[:300]:
        assert tokenizer.decode(tokenizer.encode(line)) == line


def write_sentencepiece(path: Path, processor: Any, **values: Any) -> Path:
    indices = range(processor.get_piece_size())
    kinds = (
        (processor.is_unknown, UNKNOWN),
        (processor.is_control, CONTROL),
        (processor.is_unused, UNUSED),
        (processor.is_byte, BYTE),
    )
    types = [next((kind for test, kind in kinds if test(index)), NORMAL) for index in indices]
    scores = [processor.get_score(index) for index in indices]
    named = {
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
    return write(path, [processor.id_to_piece(index) for index in indices], types, scores=scores, **{**named, **values})


@pytest.mark.slow
def test_sentencepiece_s_unigram(tmp_path: Path) -> None:
    prose = "\n".join(mixed_lines(600))
    (tmp_path / "text").write_text(prose, "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "unigram"),
        vocab_size=1500,
        character_coverage=1.0,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "unigram.model"))
    values = {
        "model": "t5",
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": charsmap(tmp_path / "unigram.model"),
    }
    tokenizer = Tokenizer(write_sentencepiece(tmp_path / "file.gguf", original, **values))
    # `tokenizers` composes a letter with several marks in another way; so it does in every model of transformers.
    for line in (line for line in mixed_lines(300) if not any(map(unicodedata.combining, line))):
        ours, theirs = tokenizer.encode(line), [*original.encode(line), original.eos_id()]
        # Sums of logarithms in single and double precision: of two ways as probable, each takes another.
        assert sum(map(original.get_score, ours)) == pytest.approx(sum(map(original.get_score, theirs)), abs=1e-4)
        assert original.decode(ours) == original.decode(theirs)


def charsmap(model: Path) -> list[int]:
    from sentencepiece import sentencepiece_model_pb2 as pb

    parsed = pb.ModelProto()
    parsed.ParseFromString(model.read_bytes())
    return list(parsed.normalizer_spec.precompiled_charsmap)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_text_is_lost(pre: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_bytes(tmp_path / "file.gguf", pre))
    for line in mixed_lines(60):
        if pre != "qwen2":  # which brings characters into their composed form
            assert tokenizer.decode(tokenizer.encode(line)) == line


CUTS = {
    "gpt-2": "I|'ll| pay| 12345|€,|\n|\n|It|'|S| CamelCase|!!|\n  | x",
    "smollm": "I|'ll| pay| |1|2|3|4|5|€,|\n|\n|It|'|S| CamelCase|!!|\n  | x",
    "llama-bpe": "I|'ll| pay| |123|45|€,\n\n|It|'S| CamelCase|!!\n|  | x",
    "qwen2": "I|'ll| pay| |1|2|3|4|5|€,\n\n|It|'S| CamelCase|!!\n|  | x",
    "seed-coder": "I|'ll| pay| |1|2|3|4|5|€,|\n\n|It|'S| CamelCase|!!|\n|  | x",
    "tekken": "I|'ll| pay| |1|2|3|4|5|€,\n\n|It|'S| Camel|Case|!!\n|  | x",
    "gpt-4o": "I'll| pay| |123|45|€,\n\n|It'S| Camel|Case|!!\n|  | x",
    "deepseek-coder": "I|'|ll| pay| |1|2|3|4|5|€|,|\n|\n|It|'|S| CamelCase|!!|\n|  | x",
    "deepseek-v3": "I|'ll| pay| |123|45|€,\n\n|It|'S| CamelCase|!!\n|  | x",
}


@pytest.mark.parametrize("pre", CUTS)
def test_where_a_text_is_cut(pre: str, tmp_path: Path) -> None:
    files = tokenizer_files(read_header(write_bytes(tmp_path / "file.gguf", pre)))
    cutter: Any = Fast.from_str(files["tokenizer.json"].decode()).pre_tokenizer
    text = "I'll pay 12345€,\n\nIt'S CamelCase!!\n   x"
    assert "|".join(text[begin:end] for _, (begin, end) in cutter.pre_tokenize_str(text)) == CUTS[pre]


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<think>", *bytes_of_gpt2(), "th"]
    types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * 257
    values = {"model": "gpt2", "pre": "gpt-2", "merges": ["t h"], "bos_token_id": 0, "eos_token_id": 1}
    file = write(tmp_path / "file.gguf", tokens, types, **values)
    tokenizer = Tokenizer(file)
    assert tokenizer.encode("the</s><think>") == [259, *tokenizer.encode("e"), 1, 2]
    assert tokenizer.decode([1, 2, 259]) == "<think>th"


@pytest.mark.parametrize(("said", "expected"), [(None, [0]), (True, [0]), (False, [])])
def test_beginnings(said: bool | None, expected: list[int], tmp_path: Path) -> None:
    by_name = Tokenizer(write_bytes(tmp_path / "llama3.gguf", "llama-bpe", add_bos_token=said))
    assert by_name.encode("") == expected
    usual = Tokenizer(write_bytes(tmp_path / "usual.gguf", "gpt-2", add_bos_token=said))
    assert usual.encode("") == ([0] if said else [])


def test_ends_where_the_file_wants_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_bytes(tmp_path / "file.gguf", add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("") == [0, 1]


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Calibration texts are encoded by transformers, chats by the runtime."""
    from transformers import AutoTokenizer

    for pre in ("llama-bpe", "qwen2", "smollm"):
        header = read_header(write_bytes(tmp_path / f"{pre}.gguf", pre, tokenizer__chat_template="{{ messages }}"))
        folder = tmp_path / pre
        folder.mkdir()
        for name, content in tokenizer_files(header).items():
            (folder / name).write_bytes(content)
        theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ours, stored = Tokenizer(header.path), Tokenizer(folder)
        assert ours.has_chat_template
        for line in mixed_lines(100):
            assert ours.encode(line) == stored.encode(line) == theirs(line).input_ids


def test_a_template_for_conversations_with_tools_is_one_of_two(tmp_path: Path) -> None:
    own = {"tokenizer__chat_template": "no tools", "tokenizer__chat_template__tool_use": "the {{ tools | length }}"}
    tokenizer, asked = Tokenizer(write_bytes(tmp_path / "a.gguf", **own)), [{"role": "user", "content": "a"}]
    assert tokenizer.decode(tokenizer.chat(asked)) == "no tools"
    assert tokenizer.decode(tokenizer.chat(asked, tools=[Tool(name="look")])) == "the 1"


def test_phi3_strips_what_follows_its_special_tokens(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "<|endoftext|>", "<|user|>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL] + [BYTE] * 256
    values = {"model": "llama", "scores": [0.0] * len(tokens), "bos_token_id": 1, "unknown_token_id": 0}
    phi3 = write(tmp_path / "phi3.gguf", tokens, types, general__architecture="phi3", **values)
    llama = write(tmp_path / "llama.gguf", tokens, types, **values)
    text = "<|user|>\na"
    assert Tokenizer(phi3).encode(text) == [1, 3, 6]
    assert Tokenizer(llama).encode(text) == [1, 3, 4, 7 + 10, 5]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"pre": "martian-bpe"}, "the pre-tokenizer 'martian-bpe' .* is not known"),
    "no-pre": ({"pre": None}, "tokenizer.ggml.pre is missing"),
    "kind": ({"model": "rwkv"}, "the tokenizer 'rwkv' .* is not supported"),
}
"""Those that are not known."""


UNIGRAM = {"model": "t5", "scores": [0.5] * 259}
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "merges": ({"merges": ["t"]}, "cannot be read"),
    "stranger": ({"merges": ["t zz"]}, "cannot be read"),
    "no-merges": ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
    "numbers": ({"merges": [1, 2]}, "a list of str"),
    "no-scores": ({"model": "llama"}, "'tokenizer.ggml.scores' is missing"),
    "scores": ({"model": "llama", "scores": [0.5]}, "259 tokens and 1 scores"),
    "flag": ({"add_bos_token": 1}, "true or false"),
    "template": ({"tokenizer__chat_template": 5}, "a string"),
    "another": ({"tokenizer__chat_template": "a", "tokenizer__chat_template__tool_use": 5}, "a string"),
    "charsmap": ({**UNIGRAM, "precompiled_charsmap": [4, 0, 0]}, "cannot be read .*precompiled_charsmap"),
    "charsmap of nothing": ({**UNIGRAM, "precompiled_charsmap": [4, 0, 0, 0, 255, 255, 255, 127]}, "crashed"),
    "charsmap of words": ({**UNIGRAM, "precompiled_charsmap": ["a"]}, "a list of int"),
    "long token": ({"model": "llama", "scores": [0.5] * 259, "tokens": ["a" * 100_000] * 259}, "100,000 characters"),
    "too many merges": (
        {"model": "llama", "scores": [0.5] * 259, "tokens": ["a" * (n + 1) for n in range(259)]},
        "1,000 ways",
    ),
}


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        *((UnsupportedModelError, *case) for case in WRONG.values()),
        *((CheckpointError, *case) for case in DAMAGED.values()),
    ],
    ids=[*WRONG, *DAMAGED],
)
def test_tokenizers_that_cannot_be(
    kind: type[Exception], values: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.gguf.tokenizer._MAX_MERGES", 1000)
    file = write_bytes(tmp_path / "file.gguf", **values)
    with pytest.raises(kind, match=said) as raised:
        Tokenizer(file).encode("text")
    assert str(file) in str(raised.value)
