"""The tokenizer of the bundled model: byte-fallback BPE with a chat template.

Spaces become `▁` and no space is added in front, so that decoding gives the text back exactly; digits stand alone; a
character outside the vocabulary becomes its UTF-8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL = (BEGIN, END, PAD, *ROLES.values())
"""Special tokens, in the order of their ids from 0."""
VOCABULARY = 2048
"""Number of tokens."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Jinja template: every message is its role's token, its text and the end token."""

_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
_PIECES = "▁?[A-Za-z]+|[0-9]|▁?[^A-Za-z0-9▁\\n]+|▁+|\\n+"


def build(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the tokenizer.

    Args:
        texts: Texts to count in.
        vocabulary: Number of tokens, with the special and the byte tokens.

    Returns:
        A tokenizer that puts the begin token in front of a text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    alphabet = ["▁", "\n", *(chr(code) for code in range(33, 127)), "×", "÷"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL, *_BYTES],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    # The trainer marks the byte tokens as special; they are ordinary vocabulary, reached only by falling back.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Args:
        tokenizer: A tokenizer of `build`.
        folder: Where to write; made if absent.
        context: Longest context of the model in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    """Tokenizer of a folder written by `save`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that the tokenizer has."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return int(found)


def chat_tokens(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation as the chat template writes it, and which of them are the model's to say.

    Returns:
        Ids, and for each whether it belongs to an answer (with the end token).
    """
    ids, answers = [token_id(tokenizer, BEGIN)], [False]
    end = token_id(tokenizer, END)
    for message in messages:
        text = tokenizer.encode(message["content"], add_special_tokens=False).ids
        ids += [token_id(tokenizer, ROLES[message["role"]]), *text, end]
        answers += [False] + [message["role"] == "assistant"] * (len(text) + 1)
    return ids, answers
