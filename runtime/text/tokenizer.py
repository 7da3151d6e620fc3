"""Tokenizer: encodes text, decodes tokens incrementally, and applies the chat template.

`runtime.text.tokenizer_files` reads its files, `runtime.text.template_process` renders its template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from models.foreign import panics_raised
from runtime.errors import ContextOverflowError, RequestError, RuntimeFailure
from runtime.system.foreign import encodable
from runtime.text.call_format import TOLD, CallFormat
from runtime.text.channels import CHANNEL_MARKS, ChannelReader, Pieces
from runtime.text.paired_marks import PAIRED_MARKS, PairedReader
from runtime.text.reasoning import opened
from runtime.text.template_process import template_process
from runtime.text.tokenizer_files import read_tokenizer
from runtime.text.tool_calls import Tool, describe_tools

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The decoder's replacement for bytes that are not, or not yet, UTF-8."""
PLAIN_TURN = {"user": "User: ", "assistant": "Assistant: "}
"""The beginning of a turn in the plain fallback."""
PLAIN_STOPS = ("\nUser:",)
"""The stop string of the plain fallback: the model starting the user's next turn."""
USUAL_CHARACTERS = 4
"""Characters per token: a longer text is counted slice by slice before it is encoded."""
SLICE, EDGE = 2**16, 64
"""Characters of such a slice, and most extra tokens caused by a cut."""
_TAG_TOKENS = 8
"""Most tokens of a tag of reasoning and the white space behind it."""
_BEGINNING = 8
"""Characters of a beginning that special tokens may share."""
_MARKED = ((CHANNEL_MARKS, ChannelReader), (PAIRED_MARKS, PairedReader))
"""Marks of answers, and what reads them."""


class Tokenizer:
    """The tokenizer of a model folder, or of a GGUF file.

    Raises:
        BackendError: no readable tokenizer was found.
        ModelError: a GGUF file is damaged, or its tokenizer is unknown.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = read_tokenizer(folder)
        self._fast, self._special, self._template = files.fast, files.special, files.template
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = int(self._fast.get_vocab_size(with_added_tokens=True))
        """Number of tokens, including added ones."""
        self.bos_token_id: int | None = self._id_of("bos_token")
        """Beginning-of-sequence token, if any."""
        self.eos_token_id: int | None = self._id_of("eos_token")
        """End-of-sequence token, if any."""
        if self._template is not None:
            template_process().start()  # loaded while the weights are

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template; otherwise `chat` writes plain `User:` and `Assistant:` turns."""
        return self._template is not None

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings for chat answers: none with a chat template, else the start of the next turn."""
        return () if self.has_chat_template else PLAIN_STOPS

    @property
    def note(self) -> str | None:
        """A note for the user about chatting with this model, or None."""
        if self.has_chat_template:
            return None
        return "this model has no chat template: turns are written as plain 'User:' and 'Assistant:' lines"

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls; None if its template writes them in a form that is not JSON."""
        if self._template is None or not self._knows_tools or self._marked is not None:
            return TOLD
        template = self._template
        return CallFormat.of_template(
            lambda messages, tools: template_process().render(template, messages, tokens=self._special, tools=tools)
        )

    @cached_property
    def _marked(self) -> Callable[[Sequence[int]], Pieces] | None:
        """Makes the reader of answers with marks, given the tokens before one; None if the tokenizer has no marks."""
        for marks, reader in _MARKED:
            if self.added_tokens.keys() >= set(marks):
                return partial(reader, [self.added_tokens[mark] for mark in marks], partial(Detokenizer, self))
        return None

    def detokenizer(self, context: Sequence[int] = ()) -> Pieces:
        """Decodes an answer token by token; `context` are the tokens before it, or the last few of them."""
        return Detokenizer(self, context) if self._marked is None else self._marked(context)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens beside the vocabulary, by their texts: special ones, and others such as Qwen's `<tool_call>`."""
        return {added.content: token for token, added in self._fast.get_added_tokens_decoder().items()}

    def to_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` package, without chat template or special-token names."""
        return str(self._fast.to_str())

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Tokens of a text.

        Args:
            text: Any text; see `encodable` for lone surrogates in it.
            special: Whether to add the tokenizer's own special tokens (usually a beginning-of-sequence token). One that
                the text already begins with is not added twice.
            most: Tokens that there is room for; None: unlimited. Encoding takes some hundred bytes for each.

        Raises:
            ContextOverflowError: the text is certainly too long; slightly too long texts are not detected.
            RequestError: the tokenizer cannot encode it.
        """
        text = encodable(text)
        with _contained(f"cannot encode this text of {len(text):,} characters"):
            if most is not None and len(text) > USUAL_CHARACTERS * most + SLICE:
                self._refuse_longer(text, most)
            ids = list(self._fast.encode(text, add_special_tokens=special).ids)
        bos = self.bos_token_id
        if special and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones; invalid UTF-8 becomes U+FFFD.

        Raises:
            RequestError: the tokenizer cannot decode them.
        """
        with _contained("cannot decode these tokens"):
            return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """The text of a single token, special ones included, for lists of log-probabilities."""
        with _contained("cannot decode this token"):
            text = str(self._fast.decode([token], skip_special_tokens=False))
        return text or str(self._fast.id_to_token(token) or "")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final: bool = False,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Tokens of a conversation, ready for the assistant's answer.

        A special token in a message is text: a space after its first character keeps it from ending the message.

        Args:
            messages: `{"role": ..., "content": ...}`, with roles system, user, assistant (and any others the template
                knows). An assistant's may have `tool_calls`, whose results are messages of the role tool.
            continue_final: Whether the last message, the assistant's, is to be continued rather than answered.
            tools: Functions that the model may call; described in a system message if its template does not support
                tools.
            variables: Further variables of the template, such as `enable_thinking`.
            most: Tokens that there is room for; see `encode`.

        Raises:
            ContextOverflowError: see `encode`.
            RequestError: no messages, one without role or text, or a sequence that the model's template refuses.
        """
        _check(messages, continue_final)
        messages = [one if one["role"] == "assistant" else {**one, "content": self._inert(one)} for one in messages]
        if self._template is None:
            return self.encode(plain_chat(describe_tools(messages, tools), continue_final=continue_final), most=most)
        told = tools or any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if told and not self._knows_tools:
            messages, tools = describe_tools(messages, tools), ()
        text = template_process().render(
            self._template,
            messages,
            tokens=self._special,
            continue_final=continue_final,
            tools=[tool.record() for tool in tools],
            variables=variables,
        )
        return self.encode(text, special=False, most=most)

    def reasoning_opened(self, prompt: Sequence[int]) -> str:
        """The tag of reasoning that the template of a chat's prompt wrote, and the answer therefore lacks; else ""."""
        return opened("".join(map(self.piece, prompt[-_TAG_TOKENS:])))

    def _inert(self, message: Mapping[str, Any]) -> str:
        """A message's text without what could end it and begin another.

        In a tool's result, which nobody here wrote, those are all added tokens and the closing tag.
        """
        marks = self._tool_marks if message["role"] == "tool" else self._special_marks
        return marks.sub(lambda found: f"{found[0][0]} {found[0][1:]}", message["content"])

    @cached_property
    def _special_marks(self) -> re.Pattern[str]:
        return _any_of(token.content for token in self._fast.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def _tool_marks(self) -> re.Pattern[str]:
        added = self._fast.get_added_tokens_decoder().values()
        return _any_of([*(token.content for token in added), "</tool_response>"])

    def _refuse_longer(self, text: str, most: int) -> None:
        """Raise if a text certainly has no room, without encoding all of it."""
        count = 0
        for begin in range(0, len(text), SLICE):
            count += len(self._fast.encode(text[begin : begin + SLICE], add_special_tokens=False).ids) - EDGE
            if count > most:
                raise ContextOverflowError(
                    f"the prompt has far more tokens than the {most} that the context holds, the answer included: "
                    "shorten the conversation, or load the model with a longer context"
                )

    @cached_property
    def _knows_tools(self) -> bool:
        return self._template is not None and template_process().knows_tools(self._template)

    def _id_of(self, name: str) -> int | None:
        """Id of a special token; None if the tokenizer does not have it."""
        text = self._special.get(name)
        return None if text is None else self._fast.token_to_id(text)


def plain_chat(messages: Sequence[Mapping[str, Any]], *, continue_final: bool) -> str:
    """A conversation as plain text, for models without a chat template.

    A system message comes first as a paragraph of its own, then `User: ...` and `Assistant: ...` lines; the last line
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
    """Incremental decoding that never splits a character.

    Tokens are decoded together with a few before them, because decoders treat the beginning of a text specially
    (sentencepiece drops its first space). Text that may end in an incomplete character is held back. The pieces plus
    `flush` equal the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """Start after `context`, the preceding tokens (or the last few of them), whose text is not emitted."""
        self._tokenizer = tokenizer
        self._window = list(context)
        self._given = tokenizer.decode(self._window)
        self._read = len(self._window)

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain, maybe empty."""
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
        """The held-back text; an incomplete character becomes U+FFFD."""
        text = self._tokenizer.decode(self._window)[len(self._given) :]
        self._given += text
        self._read = len(self._window)
        return text


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of the longest of several texts, without those of a single character or of spaces.

    Gemma has 6,242 texts `<unused...>`. Those with one beginning share a branch, so that few are tried at each `<`.
    """
    kept = sorted((text for text in set(texts) if len(text) > 1 and not text.isspace()), key=len, reverse=True)
    branches: dict[str, list[str]] = {}
    for text in kept:
        branches.setdefault(text[:_BEGINNING], []).append(re.escape(text[_BEGINNING:]))
    found = (f"{re.escape(head)}(?:{'|'.join(branches[head])})" for head in sorted(branches, key=len, reverse=True))
    return re.compile("|".join(found) or r"(?!)")


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Convert whatever the `tokenizers` package raises, panics included, into a RequestError."""
    try:
        with panics_raised():
            yield
    except RuntimeFailure:
        raise
    except Exception as error:  # it raises Exception itself
        reason = " ".join(str(error).split())[:300]
        raise RequestError(f"the model's tokenizer {what}: {reason}") from error


def _check(messages: Sequence[Mapping[str, Any]], continue_final: bool) -> None:
    """Raise RequestError if messages are missing, malformed, or cannot be continued."""
    if not messages:
        raise RequestError("messages is empty: give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise RequestError(f"messages[{index}] needs a role and a content, both text")
    if continue_final and messages[-1]["role"] != "assistant":
        raise RequestError("only an assistant's message can be continued, and the last message is not one")
