"""Reads the tokenizer of a model folder or a GGUF file.

Most need only the `tokenizers` package (`models.plain_tokenizer`); transformers reads the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.foreign import check_folder, panics_raised, read_json
from models.needed import check_needed
from models.plain_tokenizer import NAMED, TokenizerFiles, plain_tokenizer
from models.sound_tokenizer import check_sound
from runtime.errors import BackendError


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder, without accessing anything else, or of a GGUF file.

    Raises:
        BackendError: no readable tokenizer was found.
        ModelError: a GGUF file is damaged, or its tokenizer is unknown.
    """
    if not folder.exists():
        raise BackendError(f"no tokenizer: the folder {folder} is missing")
    try:
        with panics_raised():
            return _of_gguf(folder) if folder.is_file() else plain_tokenizer(folder) or _by_transformers(folder)
    except (BackendError, ModelError):
        raise
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever its parsers do
        reason = " ".join(str(error).split())[:300]
        raise BackendError(f"the tokenizer in {folder} cannot be read: {reason}") from error


def _of_gguf(file: Path) -> TokenizerFiles:
    """Read the tokenizer from a GGUF file's metadata."""
    from tokenizers import Tokenizer

    from models.gguf.header import read_header
    from models.gguf.tokenizer import TOKENIZER, TOKENIZER_CONFIG, tokenizer_files

    files = tokenizer_files(read_header(file))
    settings = json.loads(files[TOKENIZER_CONFIG])
    fast = Tokenizer.from_str(files[TOKENIZER].decode())
    return TokenizerFiles(
        fast, {name: settings[name] for name in NAMED if name in settings}, settings.get("chat_template")
    )


def _by_transformers(folder: Path) -> TokenizerFiles:
    """Read a folder with transformers; first with its fast class alone, which does not need torch."""
    check_needed("reading this tokenizer", "transformers")
    check_folder(folder)
    _check_keys(folder)
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise BackendError(f"the tokenizer in {folder} has no fast form; add its tokenizer.json to the folder")
    check_sound(tokenizer.backend_tokenizer)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerFiles(tokenizer.backend_tokenizer, dict(tokenizer.special_tokens_map), template)


def _check_keys(folder: Path) -> None:
    """Check that no token's settings have a name with terminal escapes: `tokenizers` prints unknown names.

    Raises:
        ValueError: one has.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        found = read_json(folder / name) if (folder / name).is_file() else None
        if name == "tokenizer.json" and isinstance(found, dict):
            found = found.get("added_tokens")  # the keys of the vocabulary are tokens
        waiting = [found]
        while waiting:
            inside = waiting.pop()
            if isinstance(inside, dict):
                if odd := [key for key in inside if not key.isprintable()]:
                    raise ValueError(f"{name} has a key that cannot be printed: {odd[0][:60]!a}")
                waiting += inside.values()
            elif isinstance(inside, list):
                waiting += inside
