"""Text to tokens and back: the tokenizer of a model folder, its chat template, and decoding while tokens still arrive.

Where its files are read is `runtime.tokenizer_files`, where its template is applied `runtime.chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import RequestError
from runtime.tokenizer_files import read_tokenizer
from runtime.tool_calls import Tool, told_in_words

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts where bytes are not, or not yet, UTF-8."""
PLAIN_TURN = {"user": "User: ", "assistant": "Assistant: "}
"""How the plain fallback opens a turn."""
PLAIN_STOPS = ("\nUser:",)
"""What ends an answer in the plain fallback: the model starting the person's next turn."""


class Tokenizer:
    """The tokenizer of a model folder, or of a GGUF file.

    Raises:
        BackendError: there is no tokenizer that can be read.
        ModelError: a GGUF file is damaged, or its tokenizer is not known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = read_tokenizer(folder)
        self._fast, self._special, self._template = files.fast, files.special, files.template
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = int(self._fast.get_vocab_size(with_added_tokens=True))
        """Number of tokens, added ones included."""
        self.bos_token_id: int | None = self._id_of("bos_token")
        """Beginning-of-sequence token, where the tokenizer has one."""
        self.eos_token_id: int | None = self._id_of("eos_token")
        """End-of-sequence token, where the tokenizer has one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template; if not, `chat` writes plain `User:` and `Assistant:` turns."""
        return self._template is not None

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings that a chat answer needs: none with a chat template, else the start of the next turn."""
        return () if self.has_chat_template else PLAIN_STOPS

    @property
    def note(self) -> str | None:
        """What a person should know about chatting with this model, or None."""
        if self.has_chat_template:
            return None
        return "this model has no chat template: turns are written as plain 'User:' and 'Assistant:' lines"

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` package writes it, without chat template and names of special tokens."""
        return str(self._fast.to_str())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text.

        Args:
            text: Any text.
            special: Whether the tokenizer's own special tokens are added (most often a beginning-of-sequence token). A
                beginning that the text already spells out is not added twice.
        """
        ids = list(self._fast.encode(text, add_special_tokens=special).ids)
        bos = self.bos_token_id
        if special and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """One token on its own, special ones included, for lists of log-probabilities."""
        text = str(self._fast.decode([token], skip_special_tokens=False))
        return text or str(self._fast.id_to_token(token) or "")

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, continue_final: bool = False, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Tokens of a conversation, ready for the assistant's answer.

        Args:
            messages: `{"role": ..., "content": ...}`, roles system, user, assistant (and what the template knows). An
                assistant's may have `tool_calls`, whose results are messages of the role tool.
            continue_final: Whether the last message, the assistant's, is to be continued rather than answered.
            tools: Functions that the model may ask for; told in a system message where its template knows none.

        Raises:
            RequestError: no messages, one without role or text, or a sequence that the model's template refuses.
        """
        _check(messages, continue_final)
        if self._template is None:
            return self.encode(plain_chat(told_in_words(messages, tools), continue_final=continue_final))
        from jinja2 import TemplateError

        from runtime.chat_template import knows_tools, render

        try:
            if not knows_tools(self._template):
                messages, tools = told_in_words(messages, tools), ()
            text = render(
                self._template,
                messages,
                tokens=self._special,
                continue_final=continue_final,
                tools=[tool.record() for tool in tools],
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the model's chat template does not accept these messages: {error}") from error
        return self.encode(text, special=False)

    def _id_of(self, name: str) -> int | None:
        """Id of a special token; None where the tokenizer has none of this name."""
        text = self._special.get(name)
        return None if text is None else self._fast.token_to_id(text)


def plain_chat(messages: Sequence[Mapping[str, Any]], *, continue_final: bool) -> str:
    """The conversation as plain text, for models without a chat template.

    A system message stands first as a paragraph of its own; then `User: ...` and `Assistant: ...` lines; the last line
    is an open `Assistant:`.
    """
    lines = [PLAIN_TURN.get(message["role"], "") + message["content"].strip() for message in messages]
    separators = ["\n" if message["role"] in PLAIN_TURN else "\n\n" for message in messages]
    if continue_final:
        separators[-1] = ""
        lines[-1] = PLAIN_TURN["assistant"] + messages[-1]["content"]
    text = "".join(line + separator for line, separator in zip(lines, separators, strict=True))
    return text if continue_final else text + PLAIN_TURN["assistant"].rstrip()


class Detokenizer:
    """Text of a growing sequence of tokens, never half a character.

    Tokens are decoded together with a few before them, because a decoder treats the beginning of a text in its own way
    (sentencepiece drops its first space), and text is held back while it ends in bytes that may be the first half of a
    character. All that was given out plus `flush` equals the decoded whole.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """Start after `context`, the tokens before (or the last few of them); their text is not given out."""
        self._tokenizer = tokenizer
        self._window = list(context)
        self._given = tokenizer.decode(self._window)
        self._read = len(self._window)

    def add(self, token: int) -> str:
        """Take the next token and return the text that is now certain, maybe empty."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(self._given) or text.endswith(REPLACEMENT):
            return ""
        fresh = text[len(self._given) :]
        self._window = self._window[self._read :]
        self._given = self._tokenizer.decode(self._window)
        self._read = len(self._window)
        return fresh

    def flush(self) -> str:
        """What is still held back: an unfinished character shows as U+FFFD."""
        text = self._tokenizer.decode(self._window)[len(self._given) :]
        self._given += text
        self._read = len(self._window)
        return text


def _check(messages: Sequence[Mapping[str, Any]], continue_final: bool) -> None:
    """Raise RequestError where messages are missing, malformed, or cannot be continued."""
    if not messages:
        raise RequestError("messages is empty: give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise RequestError(f"messages[{index}] needs a role and a content, both text")
    if continue_final and messages[-1]["role"] != "assistant":
        raise RequestError("only an assistant's message can be continued, and the last message is not one")
