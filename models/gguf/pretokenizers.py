"""Pre-tokenizers of byte-level BPE, by the names that GGUF files give them.

A GGUF file has no tokenizer.json, but a name that llama.cpp assigned to each way of splitting texts. These are the
corresponding settings in the models' tokenizer.json. Each further expression splits the pieces of the previous ones.

Source: src/llama-vocab.cpp of llama.cpp (names and expressions) and the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """A way of splitting texts, with the other settings that its name implies."""

    patterns: tuple[str, ...] = ()
    """Expressions whose matches are pieces, and so is what lies between."""
    gpt2: bool = False
    """Whether GPT-2's expression cuts last."""
    nfc: bool = False
    """Whether the text is brought into Unicode's composed form first."""
    ignore_merges: bool = False
    """Whether a piece that is a token is not merged from its bytes."""
    add_bos: bool = False
    """Whether texts begin with the beginning-of-sequence token where the file does not say."""


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_GPT_4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_DEEPSEEK_V3_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", rf"{_DEEPSEEK_V3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")

_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer(patterns=(r"\p{N}",), gpt2=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("a.x-4.0", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer(patterns=(_LLAMA3,))),
    "qwen2": PreTokenizer(patterns=(_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), PreTokenizer(patterns=(_QWEN2,))),
    "seed-coder": PreTokenizer(patterns=(_SEED_CODER,)),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer(patterns=(_GPT_4O,))),
    "deepseek-coder": PreTokenizer(patterns=_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(patterns=_DEEPSEEK_V3)),
    "viking": PreTokenizer(patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}
"""The known ways of splitting texts, by the value of `tokenizer.ggml.pre`."""
