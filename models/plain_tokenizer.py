"""The tokenizer of a folder, where `tokenizer.json` says all there is to know.

The `tokenizers` package alone reads such a one, in a tenth of the time that transformers takes to be imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLAIN_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that describe such a tokenizer."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that have a name, by which templates know them."""
_DEMANDING = ("fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "split_special_tokens")
"""Settings whose effect is left to transformers."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of a folder say."""

    fast: Tokenizer
    """The tokenizer."""
    special: dict[str, str]
    """Special tokens by their name, `bos_token` and so on."""
    template: str | None
    """The chat template."""


def plain_tokenizer(folder: Path) -> TokenizerFiles | None:
    """What `tokenizer.json` and plain settings say.

    Returns:
        None where that is not all there is to know: there is no such file (a sentencepiece model, `vocab.json` with
        `merges.txt`), or the other files say something that it does not, more tokens, several templates, a patched
        expression.

    Raises:
        Exception: a file is damaged, with whatever `tokenizers` and `json` raise.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    config = _json(folder / "tokenizer_config.json")
    settings = config | ({} if "added_tokens_decoder" in config else _json(folder / "special_tokens_map.json"))
    if any(config.get(key) for key in _DEMANDING) or (folder / "additional_chat_templates").is_dir():
        return None
    own = folder / "chat_template.jinja"
    template = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
    if not isinstance(template, str | None):
        return None
    asked = _special_tokens(settings)
    if asked is None:
        return None
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    if not all(text in known and known[text].special for text in asked):
        return None
    described = config.get("added_tokens_decoder", {})
    if not all(_is_known(int(index), token, fast) for index, token in described.items()):
        return None
    if not described and not set(_json(folder / "added_tokens.json")) <= known.keys():
        return None
    named = {name: _text(settings[name]) for name in NAMED if settings.get(name) is not None}
    return TokenizerFiles(fast, {name: text for name, text in named.items() if text is not None}, template)


def _special_tokens(settings: dict[str, Any]) -> set[str] | None:
    """The special tokens that settings name; None where they are written in a way that is not known here."""
    values = [value for key, value in settings.items() if key in NAMED and value is not None]
    values += [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str | dict)]
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    values += more.values() if isinstance(more, dict) else more
    texts = [_text(value) for value in values]
    return {text for text in texts if text is not None} if None not in texts else None


def _text(token: Any) -> str | None:
    """A token's text; None for what is none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_known(index: int, token: Any, fast: Tokenizer) -> bool:
    """Whether `tokenizer.json` has an added token just as the settings describe it."""
    own = fast.get_added_tokens_decoder().get(index)
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return own is not None and isinstance(token, dict) and all(token.get(key) == getattr(own, key) for key in fields)


def _json(path: Path) -> dict[str, Any]:
    """An object from a file; empty where there is no file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
