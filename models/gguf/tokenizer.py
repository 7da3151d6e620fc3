"""The tokenizer of a GGUF file as the tokenizer.json and tokenizer_config.json of Hugging Face's format.

Four kinds exist in models of the supported architectures: byte-level BPE (`gpt2`), sentencepiece's BPE, which merges
by scores (`llama`) or by a list (`gemma4`), and sentencepiece's Unigram (`t5`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.errors import CheckpointError, UnsupportedModelError
from models.families.fields import Fields
from models.foreign import panics_raised
from models.gguf.header import Header
from models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from models.gguf.vocabulary import UNKNOWN, Vocabulary, list_of, read_vocabulary
from models.sound_tokenizer import check_sound

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_REMEDY = "Take another conversion of the model."
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
            f"{header.path}: does not say how texts are cut before they are encoded (tokenizer.ggml.pre is missing, as "
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
    """The tokenizer of a file."""
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
    """Normalizer, or None, and pre-tokenizer of a way of splitting texts.

    Args:
        way: One of `PRE_TOKENIZERS`.
        space: Whether a text gets a space in front.
    """
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
            f"{header.path}: has {len(vocabulary.tokens)} tokens and {len(scores)} scores. They do not belong "
            f"together. {_REMEDY}"
        )
    return scores


def _unknown(vocabulary: Vocabulary) -> str | None:
    """The token for text outside the vocabulary."""
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
    """Add special tokens at the beginning and end of texts."""
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
    return config


def _flag(header: Header, key: str, default: bool) -> bool:
    return _fields(header).flag(f"tokenizer.ggml.{key}", default)


def _fields(header: Header) -> Fields:
    return Fields(table=header.metadata, source=str(header.path), remedy=_REMEDY)
