"""Tokenizer files and the token windows that run through the model while it is quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from models.errors import CheckpointError, QuantizationError
from models.foreign import check_folder, panics_raised, read_json
from models.plain_tokenizer import PLAIN_FILES, TOKENIZER_FILES, chat_template, plain_tokenizer
from models.quantizers import SECOND_MOMENTS, SENSITIVITIES
from models.spec import ModelSpec
from models.store.durable import TEMPORARY, explained, private_folder, remove_folder

WINDOW = 256
"""Tokens per sequence."""
_BATCH = 4
CALIBRATION_TOKENS = 2048
"""Maximum number of calibration tokens."""
SECOND_MOMENT_TOKENS = 4096
"""The same for methods that need more than one number per channel, such as a Hessian or sensitivities. Twice as many
are no better (docs/decisions/models.md)."""
EVALUATION_TOKENS = 1024
"""Maximum number of evaluation tokens."""
_DESCRIBING_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
LAST_TOKENIZER_FILE = "tokenizer_config.json"
"""Saved last, so that its existence shows that all are complete."""


def calibration_limit(method: str) -> int:
    return SECOND_MOMENT_TOKENS if method in SECOND_MOMENTS | SENSITIVITIES else CALIBRATION_TOKENS


def convert_tokenizer(checkpoint: Path, folder: Path, save: Callable[[str, bytes], None]) -> None:
    """Write the tokenizer of a checkpoint as tokenizer.json and tokenizer_config.json, whatever form it has there.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or one that cannot be read without running its code.
        StoreError: the disk refuses.
    """
    if not any((checkpoint / name).is_file() for name in TOKENIZER_FILES if name != "tokenizer_config.json"):
        raise CheckpointError(
            f"{checkpoint} has no tokenizer (tokenizer.json or tokenizer.model); take the tokenizer files from where "
            "the model came from and put them beside its weights"
        )
    scratch = folder / f"tokenizer{TEMPORARY}"
    remove_folder(scratch)
    private_folder(scratch)
    try:
        with panics_raised():
            tokenizer = None if plain_tokenizer(checkpoint) else _load_tokenizer(checkpoint)
    except Exception as error:  # tokenizers and transformers let through whatever their parsers raise
        shutil.rmtree(scratch, ignore_errors=True)
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"cannot read the tokenizer of {checkpoint}: {reason}") from error
    with explained(f"cannot write the tokenizer into {scratch}"):
        if tokenizer is None:
            _copy_plain(checkpoint, scratch)
        else:
            tokenizer.save_pretrained(scratch)
        if not isinstance(template := chat_template(checkpoint), str | None):
            _keep_templates(template, scratch)
    written = sorted(path.name for path in scratch.iterdir() if path.is_file())
    if "tokenizer.json" not in written:
        remove_folder(scratch)
        raise CheckpointError(
            f"the tokenizer of {checkpoint} cannot be converted to tokenizer.json; look for a version of the model "
            "that has this file"
        )
    for name in sorted(written, key=lambda name: name == LAST_TOKENIZER_FILE):
        save(name, (scratch / name).read_bytes())
    remove_folder(scratch)


def _copy_plain(checkpoint: Path, folder: Path) -> None:
    """Copy what `plain_tokenizer` looks at; a folder without settings of its own gets empty ones."""
    for name in PLAIN_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    if not (folder / LAST_TOKENIZER_FILE).exists():
        (folder / LAST_TOKENIZER_FILE).write_text("{}\n", encoding="utf-8")


def _keep_templates(several: Any, folder: Path) -> None:
    """Write several templates into the settings, so that a stored model has no folders."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = folder / LAST_TOKENIZER_FILE
    config = read_json(settings) | {"chat_template": several}
    settings.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _load_tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer, LlamaTokenizer

    check_folder(checkpoint)
    bare = all((checkpoint / name).exists() == (name == "tokenizer.model") for name in _DESCRIBING_FILES)
    if bare:
        # A sentencepiece model alone, as the first Llama and Mistral checkpoints had, does not say that texts begin
        # with <s>; AutoTokenizer would drop that and the leading space.
        return LlamaTokenizer.from_pretrained(checkpoint, local_files_only=True, add_bos_token=True)
    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)


def token_windows(
    folder: Path, spec: ModelSpec, text: str, limit: int, purpose: str, *, spread: bool = False
) -> list[torch.Tensor]:
    """Cut a text into sequences for the model.

    Every sequence begins with the tokenizer's beginning-of-sequence token if the tokenizer begins texts with it.

    Args:
        folder: Holds the tokenizer files.
        spec: The architecture.
        text: The text.
        limit: Most tokens to use.
        purpose: What the text is for, for errors.
        spread: Whether to take sequences from all over a text that is too long, so that each kind of writing in it has
            a share; else its beginning is taken. Of a very long text the first `limit` * 64 characters count.

    Returns:
        int64 [B, S] with B <= 4 of whole windows, and int64 [1, S] of the rest of the text; each S >= 2.

    Raises:
        QuantizationError: the text is too short.
        CheckpointError: the tokenizer knows tokens that the model does not.
    """
    # A token is seldom longer than 16 characters; without the cut a book would be encoded for its first page.
    try:
        with panics_raised():
            tokens = _encode(folder, text[: limit * (64 if spread else 16)])
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the tokenizer of the model cannot encode the {purpose} text: {reason}") from error
    tokens = tokens if spread else tokens[:limit]
    if len(tokens) < 2:
        raise QuantizationError(f"the {purpose} text is too short: it has {len(tokens)} tokens, 2 are needed")
    if max(tokens) >= spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer gives token {max(tokens)}, the model knows {spec.vocab_size} tokens; they do not belong "
            "together"
        )
    begins = tokens[0] == spec.bos_token_id
    body, prefix = (tokens[1:], [tokens[0]]) if begins else (tokens, [])
    return _cut(body, prefix, min(WINDOW, spec.max_context), limit)


def _encode(folder: Path, text: str) -> list[int]:
    """Tokens of a text by the tokenizer in a folder that `convert_tokenizer` filled."""
    plain = plain_tokenizer(folder)
    if plain is not None:
        plain.fast.no_truncation()
        plain.fast.no_padding()
        return list(plain.fast.encode(text).ids)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return list(tokenizer(text, verbose=False).input_ids)


def _cut(tokens: Sequence[int], prefix: list[int], window: int, limit: int) -> list[torch.Tensor]:
    """Sequences of a window; where they are more than the limit allows, as many of them at equal distances."""
    step = window - len(prefix)
    starts = range(0, len(tokens), step)
    if len(tokens) + len(prefix) > limit:
        wanted = max(1, limit // window)
        starts_kept = [starts[i * len(starts) // wanted] for i in range(wanted)]
    else:
        starts_kept = list(starts)
    sequences = [[*prefix, *tokens[start : start + step]] for start in starts_kept]
    whole = [sequence for sequence in sequences if len(sequence) == window]
    batches = [torch.tensor(whole[start : start + _BATCH]) for start in range(0, len(whole), _BATCH)]
    rest = [sequence for sequence in sequences if 2 <= len(sequence) < window]
    return batches + [torch.tensor([sequence]) for sequence in rest]
