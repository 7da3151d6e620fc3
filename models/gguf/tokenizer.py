"""The tokenizer of a GGUF file as the tokenizer.json and tokenizer_config.json of Hugging Face's format.

Four kinds exist in models of the supported architectures: byte-level BPE (`gpt2`), sentencepiece's BPE, which merges
by scores (`llama`) or by a list (`gemma4`), and sentencepiece's Unigram (`t5`). A file has no tokenizer.json, but the
name that llama.cpp assigned to each way of splitting texts; `PRE_TOKENIZERS` has the corresponding settings of the
models' tokenizer.json, in which each further expression splits the pieces of the previous ones.

Source: src/llama-vocab.cpp of llama.cpp (names and expressions) and the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.errors import CheckpointError, UnsupportedModelError
from models.families.fields import Fields
from models.foreign import panics_raised
from models.gguf.header import Header
from models.plain_tokenizer import check_sound, several

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, by the values of `tokenizer.ggml.token_type`."""
ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
        *("<EOT>", "<end_of_turn>", "<|return|>", "[EOT]", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
        *("<|assistant_end|>", "<|tools_suffix|>"),
    }
)
"""Special tokens that end an answer in every model that has them; a file names only one or two of them."""

_REMEDY = "Take another conversion of the model."
_MAX_TOKENS = 1 << 22
"""The longest list of what belongs to tokens: their texts, types, scores or merges."""
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
"""Keys of the ids of special tokens, by the names that templates and Hugging Face's format have for them. One is
spelled so in the format."""
_USED = ("bos_token", "eos_token")
"""Those without which texts would be read or ended wrongly; the others may have any number."""
_TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"
"""The template of conversations with tools, where it is another one."""
_ENDING = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a file."""

    tokens: tuple[str, ...]
    """Text of each token by its id."""
    types: tuple[int, ...]
    named: Mapping[str, str]
    """Text of the special tokens that have a name, `bos_token` and so on."""

    @property
    def special(self) -> list[str]:
        """Tokens that stand for no text, by their ids."""
        named = set(self.named.values())
        return [
            token
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (UNKNOWN, CONTROL) or token in named
        ]

    @property
    def user_defined(self) -> list[str]:
        """Tokens that stand for their text wherever it occurs, and are no special ones."""
        named = set(self.named.values())
        return [
            token
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind == USER_DEFINED and token not in named
        ]

    @property
    def ids(self) -> dict[str, int]:
        """Ids by text; of tokens with the same text the first."""
        return {token: index for index, token in reversed(list(enumerate(self.tokens)))}


def read_vocabulary(header: Header) -> Vocabulary:
    """Read the tokens of a file."""
    tokens = list_of(header, "tokens", str)
    types = list_of(header, "token_type", int, default=[NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path} has {len(tokens)} tokens and {len(types)} types of tokens. They do not belong together. "
            f"{_REMEDY}"
        )
    fields = _fields(header)
    named: dict[str, str] = {}
    for name, key in NAMED.items():
        full = f"tokenizer.ggml.{key}"
        for index in fields.token_ids(full) if name in _USED else [header.metadata.get(full)]:
            if type(index) is int and 0 <= index < len(tokens):
                named[name] = tokens[index]
            elif name in _USED:
                raise fields.wrong(full, index, f"the number of one of {len(tokens)} tokens")
    return Vocabulary(tokens=tuple(tokens), types=tuple(types), named=named)


def ends_of_generation(header: Header, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: those that the file names, and those with that meaning in every model."""
    fields = _fields(header)
    said = [index for key in _ENDING for index in fields.token_ids(f"tokenizer.ggml.{key}")]
    known = [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token in ENDS and kind in (CONTROL, USER_DEFINED)
    ]
    return tuple(dict.fromkeys(index for index in (*said, *known) if index < len(vocabulary.tokens)))


def list_of(header: Header, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """A list of the tokenizer's metadata.

    Args:
        header: The file's.
        key: Its key after `tokenizer.ggml.`.
        kind: Type of its values.
        default: What an absent one means; None: it must be there.
    """
    full = f"tokenizer.ggml.{key}"
    value = header.metadata.get(full, default)
    if value is None:
        raise CheckpointError(f"{header.path} has no tokenizer ('{full}' is missing). {_REMEDY}")
    if not isinstance(value, list | memoryview) or len(value) > _MAX_TOKENS:
        raise _fields(header).wrong(full, value, f"a list of {kind.__name__}, at most {_MAX_TOKENS:,}")
    if not all(isinstance(entry, kind) for entry in value):
        raise _fields(header).wrong(full, value, f"a list of {kind.__name__}")
    return list(value)


TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_SPACE = "▁"
"""Sentencepiece's character for a space."""
_KINDS = ("gpt2", "llama", "gemma4", "t5")
_MAX_TOKEN, _MAX_MERGES = 512, 1 << 21
"""Limits at four times the largest known sentencepiece vocabularies, since time and memory grow with both."""


def check_tokenizer(header: Header) -> str:
    """Check that a file's tokenizer is of a known kind and splits texts in a known way. Returns the kind.

    Raises:
        UnsupportedModelError: it is not.
        CheckpointError: the file does not name it.
    """
    fields = _fields(header)
    kind = fields.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{header.path}: the tokenizer '{kind}' (tokenizer.ggml.model) is not supported (supported: "
            f"{', '.join(_KINDS)}). Choose another model."
        )
    name = fields.text("tokenizer.ggml.pre", "")
    if kind == "gpt2" and not name:
        raise UnsupportedModelError(
            f"{header.path} does not say how texts are cut before they are encoded (tokenizer.ggml.pre is missing, as "
            "in conversions made before May 2024). Take a newer conversion of the model."
        )
    if kind == "gpt2" and name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{header.path}: the pre-tokenizer '{name}' (tokenizer.ggml.pre) is not known (known: "
            f"{', '.join(PRE_TOKENIZERS)}). Take the model's Hugging Face checkpoint."
        )
    return kind


def tokenizer_files(header: Header) -> dict[str, bytes]:
    """The files of a GGUF file's tokenizer by their names.

    Raises:
        UnsupportedModelError: the kind of tokenizer, or its way of cutting texts, is not known.
        CheckpointError: it is missing or damaged.
    """
    vocabulary, kind = read_vocabulary(header), check_tokenizer(header)
    try:
        with panics_raised():
            tokenizer = _made(header, vocabulary, kind)
            check_sound(tokenizer)
            content = tokenizer.to_str()
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # tokenizers raises Exception itself
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{header.path}: the tokenizer cannot be read ({reason}). {_REMEDY}") from error
    return {
        TOKENIZER: content.encode(),
        TOKENIZER_CONFIG: json.dumps(_config(header, vocabulary), ensure_ascii=False, indent=2).encode(),
    }


def _made(header: Header, vocabulary: Vocabulary, kind: str) -> Tokenizer:
    if kind == "gpt2":
        tokenizer, begins, ends = _byte_level(header, vocabulary)
    elif kind in ("llama", "gemma4"):
        tokenizer, begins, ends = _sentencepiece_bpe(header, vocabulary, listed=kind == "gemma4")
    else:
        tokenizer, begins, ends = _unigram(header, vocabulary)
    _add_tokens(tokenizer, header, vocabulary, kind)
    _enclose(tokenizer, vocabulary, _flag(header, "add_bos_token", begins), _flag(header, "add_eos_token", ends))
    return tokenizer


def _byte_level(header: Header, vocabulary: Vocabulary) -> tuple[Tokenizer, bool, bool]:
    """BPE over bytes. Returns the tokenizer, and whether texts begin and end with special tokens by default."""
    from tokenizers import Tokenizer, decoders, models

    way = PRE_TOKENIZERS[_fields(header).text("tokenizer.ggml.pre")]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, _listed(header), ignore_merges=way.ignore_merges))
    normalizer, tokenizer.pre_tokenizer = cutter(way, space=_flag(header, "add_space_prefix", False))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, way.add_bos, False


def cutter(way: PreTokenizer, *, space: bool) -> tuple[Any, Any]:
    from tokenizers import Regex, normalizers, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in way.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=way.gpt2)
    return normalizers.NFC() if way.nfc else None, pre_tokenizers.Sequence([*cuts, last])


def _sentencepiece_bpe(header: Header, vocabulary: Vocabulary, *, listed: bool) -> tuple[Tokenizer, bool, bool]:
    """BPE that merges the pair whose token has the best score, or is listed first; unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = vocabulary.ids
    merges = _listed(header) if listed else _merges(ids, _scores(header, vocabulary))
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=_unknown(vocabulary), fuse_unk=True, byte_fallback=True))
    prefix = _flag(header, "add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer, True, False


def _listed(header: Header) -> list[tuple[str, str]]:
    """Pairs in the order in which they are merged, as the file lists them."""
    return [(left, right) for left, _, right in (pair.partition(" ") for pair in list_of(header, "merges", str))]


def _merges(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first; of those for the same token, the longest left part.

    Raises:
        ValueError: a token is so long, or the ways are so many, that no model can have them.
    """
    found: list[tuple[float, int, int]] = []
    tokens = {index: token for token, index in ids.items()}
    for index, token in tokens.items():
        if len(token) > _MAX_TOKEN:
            raise ValueError(f"token {index} has {len(token):,} characters")
        cuts = (cut for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids)
        found += [(-scores[index], -cut, index) for cut in cuts]
        if len(found) > _MAX_MERGES:
            raise ValueError(f"there are more than {_MAX_MERGES:,} ways to make a token of two others")
    found.sort()
    return [(tokens[index][:-cut], tokens[index][-cut:]) for _, cut, index in found]


def _unigram(header: Header, vocabulary: Vocabulary) -> tuple[Tokenizer, bool, bool]:
    """Sentencepiece's Unigram: the most probable of all ways to write a text with the tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = _unknown(vocabulary)
    scored = list(zip(vocabulary.tokens, _scores(header, vocabulary), strict=True))
    tokenizer = Tokenizer(models.Unigram(scored, None if unknown is None else vocabulary.ids[unknown], False))
    steps: list[Any] = []
    if charsmap := _charsmap(header):
        steps.append(normalizers.Precompiled(charsmap))
    if _flag(header, "remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if _flag(header, "add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return tokenizer, False, True


def _charsmap(header: Header) -> bytes:
    """Sentencepiece's table of character replacements, in its own format; empty if there is none."""
    value = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if isinstance(value, memoryview) and value.itemsize == 1:
        return value.tobytes()
    return bytes(number & 0xFF for number in list_of(header, "precompiled_charsmap", int, default=[]))


def _scores(header: Header, vocabulary: Vocabulary) -> list[float]:
    scores = list_of(header, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{header.path} has {len(vocabulary.tokens)} tokens and {len(scores)} scores. They do not belong "
            f"together. {_REMEDY}"
        )
    return scores


def _unknown(vocabulary: Vocabulary) -> str | None:
    if "unk_token" in vocabulary.named:
        return vocabulary.named["unk_token"]
    return next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN), None)


def _add_tokens(tokenizer: Tokenizer, header: Header, vocabulary: Vocabulary, kind: str) -> None:
    """Register the tokens that are matched in a text before any other processing."""
    from tokenizers import AddedToken

    # Phi-3's own tokenizer strips blanks after special tokens, which the file does not say.
    strips = kind == "llama" and header.metadata.get("general.architecture") == "phi3"
    kept = {vocabulary.named.get(name) for name in ("bos_token", "unk_token")} | {"<|endoftext|>"}
    tokenizer.add_special_tokens(
        [AddedToken(t, rstrip=strips and t not in kept, normalized=False, special=True) for t in vocabulary.special]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.user_defined])


def _enclose(tokenizer: Tokenizer, vocabulary: Vocabulary, begins: bool, ends: bool) -> None:
    from tokenizers import processors

    begin = vocabulary.named.get("bos_token") if begins else None
    end = vocabulary.named.get("eos_token") if ends else None
    around = [token for token in (begin, end) if token is not None]
    if around:
        parts = [part for part in (begin, "$A", end) if part is not None]
        pair = [*parts, *("$B:1" if part == "$A" else f"{part}:1" for part in parts)]
        tokens = [(token, vocabulary.ids[token]) for token in dict.fromkeys(around)]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, pair=pair, special_tokens=tokens)


def _config(header: Header, vocabulary: Vocabulary) -> dict[str, Any]:
    fields = _fields(header)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **vocabulary.named,
    }
    if header.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = fields.text("tokenizer.chat_template")
    if config.get("chat_template") and header.metadata.get(_TOOL_TEMPLATE):
        config["chat_template"] = several(config["chat_template"], fields.text(_TOOL_TEMPLATE))
    return config


def _flag(header: Header, key: str, default: bool) -> bool:
    return _fields(header).flag(f"tokenizer.ggml.{key}", default)


def _fields(header: Header) -> Fields:
    return Fields(table=header.metadata, source=str(header.path), remedy=_REMEDY)
