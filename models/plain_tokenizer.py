"""The tokenizer of a folder that is fully described by `tokenizer.json`.

The `tokenizers` package alone reads it, in a tenth of the time that importing transformers takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.foreign import MAX_JSON, read_file, read_json
from models.sound_tokenizer import check_sound

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
"""Special tokens that templates refer to by name."""
_DEMANDING = ("fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "split_special_tokens")
"""Settings that only transformers implements."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer described by a folder's files."""

    fast: Tokenizer
    """The tokenizer."""
    special: dict[str, str]
    """Special tokens by their name, `bos_token` and so on."""
    template: str | None
    """The chat template."""


def plain_tokenizer(folder: Path) -> TokenizerFiles | None:
    """Read a tokenizer from `tokenizer.json` and plain settings.

    Returns:
        None if these don't describe it fully: there is no such file (a sentencepiece model, `vocab.json` with
        `merges.txt`), or the other files add something, such as more tokens, several templates or a patched
        expression.

    Raises:
        Exception: a file is damaged; `tokenizers` and `json` raise various types.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    config = _json(folder / "tokenizer_config.json")
    settings = config | ({} if "added_tokens_decoder" in config else _json(folder / "special_tokens_map.json"))
    if any(config.get(key) for key in _DEMANDING) or (folder / "additional_chat_templates").is_dir():
        return None
    own = folder / "chat_template.jinja"
    template = read_file(own, MAX_JSON).decode() if own.is_file() else config.get("chat_template")
    if not isinstance(template, str | None):
        return None
    asked = _special_tokens(settings)
    if asked is None:
        return None
    from tokenizers import Tokenizer

    fast = Tokenizer.from_buffer(read_file(folder / "tokenizer.json"))
    check_sound(fast)
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
    """The special tokens named in settings; None if their form is unknown."""
    values = [value for key, value in settings.items() if key in NAMED and value is not None]
    values += [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str | dict)]
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    values += more.values() if isinstance(more, dict) else more
    texts = [_text(value) for value in values]
    return {text for text in texts if text is not None} if None not in texts else None


def _text(token: Any) -> str | None:
    """A token's text; None if it is not a token."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_known(index: int, token: Any, fast: Tokenizer) -> bool:
    """Whether `tokenizer.json` has an added token exactly as the settings describe it."""
    own = fast.get_added_tokens_decoder().get(index)
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return own is not None and isinstance(token, dict) and all(token.get(key) == getattr(own, key) for key in fields)


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    return dict(read_json(path)) if path.is_file() else {}
