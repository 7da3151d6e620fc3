"""The tokenizer of a folder that is fully described by `tokenizer.json`, and checks before it sees any text.

The `tokenizers` package alone reads it, in a tenth of the time that importing transformers takes. It follows its file
blindly, though: a file may replace each character by a thousand others, and those again, until the memory is exhausted
and the process aborts. So growth of texts is bounded (`check_sound`).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.foreign import MAX_JSON, panics_raised, read_file, read_json

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
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Where a folder has the template of conversations with tools, if it is another one."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE,
)
"""Files of a checkpoint that may belong to its tokenizer."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates refer to by name."""
_DEMANDING = ("fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "split_special_tokens")
"""Settings that only transformers implements."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer described by a folder's files."""

    fast: Tokenizer
    special: dict[str, str]
    """Special tokens by their name, `bos_token` and so on."""
    template: str | None
    tool_template: str | None = None
    """That of conversations with tools, where it is another one."""


def plain_tokenizer(folder: Path) -> TokenizerFiles | None:
    """Read a tokenizer from `tokenizer.json` and plain settings.

    Returns:
        None if these don't describe it fully: there is no such file (a sentencepiece model, `vocab.json` with
        `merges.txt`), or the other files add something, such as more tokens or a patched expression.

    Raises:
        Exception: a file is damaged; `tokenizers` and `json` raise various types.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    config = _json(folder / "tokenizer_config.json")
    settings = config | ({} if "added_tokens_decoder" in config else _json(folder / "special_tokens_map.json"))
    if any(config.get(key) for key in _DEMANDING):
        return None
    given = chat_template(folder, config)
    template, tools = templates(given)
    if given is not None and template is None:
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
    return TokenizerFiles(fast, {name: text for name, text in named.items() if text is not None}, template, tools)


def chat_template(folder: Path, config: Mapping[str, Any] | None = None) -> Any:
    """A chat template: files of its own, else a member of `tokenizer_config.json`; a text, or several with names.

    Args:
        folder: The model's.
        config: What that file holds; None: read it.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is malformed.
    """
    own, tools = folder / "chat_template.jinja", folder / TOOL_TEMPLATE
    if not own.is_file():
        return (_json(folder / "tokenizer_config.json") if config is None else config).get("chat_template")
    default = read_file(own, MAX_JSON).decode()
    return several(default, read_file(tools, MAX_JSON).decode()) if tools.is_file() else default


def several(default: str, tools: str) -> list[dict[str, str]]:
    """Two templates as a member of `tokenizer_config.json` holds them."""
    return [{"name": "default", "template": default}, {"name": "tool_use", "template": tools}]


def templates(given: Any) -> tuple[str | None, str | None]:
    """The template of conversations, and of those with tools, of a text, or of several by their names (Command R7B)."""
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    default, tools = (given.get("default"), given.get("tool_use")) if isinstance(given, dict) else (given, None)
    return default if isinstance(default, str) else None, tools if isinstance(tools, str) else None


def _special_tokens(settings: dict[str, Any]) -> set[str] | None:
    """The special tokens named in settings; None if their form is unknown."""
    values = [value for key, value in settings.items() if key in NAMED and value is not None]
    values += [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str | dict)]
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    values += more.values() if isinstance(more, dict) else more
    texts = [_text(value) for value in values]
    return {text for text in texts if text is not None} if None not in texts else None


def _text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_known(index: int, token: Any, fast: Tokenizer) -> bool:
    own = fast.get_added_tokens_decoder().get(index)
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return own is not None and isinstance(token, dict) and all(token.get(key) == getattr(own, key) for key in fields)


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    return dict(read_json(path)) if path.is_file() else {}


_MAX_GROWTH = 1000
"""Maximum growth factor of a text; known tokenizers reach 20 at most."""
_MAX_COPIES, _MAX_ADDED = 1, 1000
"""Likewise of tokens: known tokenizers add four at most."""
_GROWTH = {"NFD": 4, "NFKD": 18, "NFKC": 18, "NFC": 3, "Lowercase": 3, "ByteLevel": 2, "BertNormalizer": 12}
_TEXTS = ("The 2 quick foxes,\n\n\tjumped.", "naïve ﬁ É ½ 日本語 🙂👩‍👧 \u0301\u200b")


def check_sound(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer neither inflates texts nor crashes.

    Raises:
        ValueError: it does.
    """
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if part is not None and _growth(json.loads(part.__getstate__())) > _MAX_GROWTH:
            raise ValueError(f"it makes texts more than {_MAX_GROWTH:,} times as long")
    if tokenizer.post_processor is not None:
        copies, added = _processed(json.loads(tokenizer.post_processor.__getstate__()))
        if copies > _MAX_COPIES or added > _MAX_ADDED:
            raise ValueError(f"it repeats texts, or adds more than {_MAX_ADDED:,} tokens to each")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in _TEXTS:
        with panics_raised():
            try:
                tokenizer.decode(tokenizer.encode(text).ids)
            except Exception:  # noqa: BLE001, S112 -- it need not be able to encode this text
                continue


def _processed(step: Mapping[str, Any]) -> tuple[int, int]:
    """How often a post-processor repeats a text's tokens, and how many it adds."""
    if step.get("type") == "Sequence":
        copies, added = 1, 0
        for inner in step["processors"]:
            more, own = _processed(inner)
            copies, added = copies * more, added * more + own
        return copies, added
    if step.get("type") != "TemplateProcessing":
        return 1, 2
    found = []
    for form in ("single", "pair"):
        names = [piece["SpecialToken"]["id"] for piece in step[form] if "SpecialToken" in piece]
        added = sum(len(step["special_tokens"].get(name, {"ids": ()})["ids"]) for name in names)
        found.append((max(1, (len(step[form]) - len(names)) // (1 + (form == "pair"))), added))
    return max(copies for copies, _ in found), max(added for _, added in found)


def _growth(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Sequence":
        inner = [own for key in ("normalizers", "pretokenizers", "decoders") for own in step.get(key, ())]
        return math.prod(map(_growth, inner))
    if kind == "Replace":
        pattern = step["pattern"].get("String")  # an expression may match the empty text before every character
        return max(1.0, len(step["content"]) / len(pattern)) if pattern else 1.0 + len(step["content"])
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":
        content = base64.b64decode(step["precompiled_charsmap"])
        texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return max(1, *map(len, texts))
    return _GROWTH.get(str(kind), 1)
