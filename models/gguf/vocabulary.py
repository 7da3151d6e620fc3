"""The vocabulary in a GGUF file's metadata: tokens, their types, and named special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import CheckpointError
from models.families.fields import Fields
from models.gguf.header import Header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, by the values of `tokenizer.ggml.token_type`."""
ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
        *("<EOT>", "<end_of_turn>", "<|return|>", "[EOT]", "<turn|>"),
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
_ENDING = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a file."""

    tokens: tuple[str, ...]
    """Text of each token by its id."""
    types: tuple[int, ...]
    """Type of each token."""
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
    """Read the tokens of a file.

    Raises:
        CheckpointError: there are none, or their metadata does not match them.
    """
    tokens = list_of(header, "tokens", str)
    types = list_of(header, "token_type", int, default=[NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path}: has {len(tokens)} tokens and {len(types)} types of tokens. They do not belong together. "
            f"{_REMEDY}"
        )
    fields = _fields(header)
    named: dict[str, str] = {}
    for name, key in NAMED.items():
        for index in fields.token_ids(f"tokenizer.ggml.{key}"):
            if index >= len(tokens):
                raise fields.wrong(f"tokenizer.ggml.{key}", index, f"the number of one of {len(tokens)} tokens")
            named[name] = tokens[index]
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

    Raises:
        CheckpointError: it is missing, or holds something else.
    """
    full = f"tokenizer.ggml.{key}"
    value = header.metadata.get(full, default)
    if value is None:
        raise CheckpointError(f"{header.path}: has no tokenizer ('{full}' is missing). {_REMEDY}")
    if not isinstance(value, list | memoryview) or len(value) > _MAX_TOKENS:
        raise _fields(header).wrong(full, value, f"a list of {kind.__name__}, at most {_MAX_TOKENS:,}")
    if not all(isinstance(entry, kind) for entry in value):
        raise _fields(header).wrong(full, value, f"a list of {kind.__name__}")
    return list(value)


def _fields(header: Header) -> Fields:
    return Fields(table=header.metadata, source=str(header.path), remedy=_REMEDY)
