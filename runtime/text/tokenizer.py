"""Tokenizer: encodes text, decodes tokens incrementally, and applies the chat template.

Most need only the `tokenizers` package (`models.plain_tokenizer`); transformers reads the others.
`runtime.text.template_process` renders the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from models.errors import ModelError, check_needed
from models.foreign import check_folder, panics_raised, read_json
from models.plain_tokenizer import NAMED, TokenizerFiles, check_sound, plain_tokenizer, templates
from runtime.errors import BackendError, ContextOverflowError, RequestError, RuntimeFailure
from runtime.system.foreign import encodable
from runtime.text.channels import (
    APERTUS_MARKS,
    CHANNEL_MARKS,
    COHERE_MARKS,
    PAIRED_MARKS,
    ChannelReader,
    ListedReader,
    PairedReader,
    Pieces,
)
from runtime.text.reasoning import TAGS, opened, outside_tags
from runtime.text.template_process import template_process
from runtime.text.tool_calls import TOLD, CallFormat, Tool, describe_tools

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The decoder's replacement for bytes that are not, or not yet, UTF-8."""
CUT = "\ufdd0"
"""Where the text of a conversation is cut before it is encoded: a noncharacter, which stands in no text."""
RESULT_END = "</tool_response>"
"""What ends a tool's result in many templates, whether or not it is a token."""
USUAL_CHARACTERS = 4
"""Characters per token: a longer text is counted slice by slice before it is encoded."""
SLICE, EDGE = 2**16, 64
"""Characters of such a slice, and most extra tokens caused by a cut."""
_TAG_TOKENS = 8
"""Most tokens of a tag of reasoning and the white space behind it."""
_BEGINNING = 8
"""Characters of a beginning that special tokens may share."""
_ORDINARY = re.compile(r"</?[a-z]+[0-9]?>|\w[\w ]*")
"""Added tokens that are mere text: words, and the HTML tags of Gemma."""
_MARKED = (
    (CHANNEL_MARKS, ChannelReader),
    (PAIRED_MARKS, PairedReader),
    (COHERE_MARKS, ListedReader),
    (APERTUS_MARKS, ListedReader),
)
"""Marks of answers, and what reads them."""


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
    named = {name: settings[name] for name in NAMED if name in settings}
    return TokenizerFiles(fast, named, *templates(settings.get("chat_template")))


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
    special = dict(tokenizer.special_tokens_map)
    return TokenizerFiles(tokenizer.backend_tokenizer, special, *templates(tokenizer.chat_template))


def _check_keys(folder: Path) -> None:
    """Check that no token's settings have a name with terminal escapes: `tokenizers` prints unknown names.

    Raises:
        ValueError: one has.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        settings = read_json(folder / name) if (folder / name).is_file() else None
        if name == "tokenizer.json" and isinstance(settings, dict):
            settings = settings.get("added_tokens")  # the keys of the vocabulary are tokens
        waiting = [settings]
        while waiting:
            inside = waiting.pop()
            if isinstance(inside, dict):
                if odd := [key for key in inside if not key.isprintable()]:
                    raise ValueError(f"{name} has a key that cannot be printed: {odd[0][:60]!a}")
                waiting += inside.values()
            elif isinstance(inside, list):
                waiting += inside


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
        self._tool_template = files.tool_template or files.template
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
        """Whether the model has a chat template; a base model, which has none, continues a conversation as a text."""
        return self._template is not None

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls; None if its template writes them in a form that is not JSON."""
        template = self._tool_template
        if template is None or not self._knows_tools or self._marked is not None:
            return TOLD
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
            self._check_length(text, most)
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

        Control tokens are the template's alone. In data their texts stay as they are, but are encoded in two parts; an
        answer's tags of reasoning are the exception.

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
        try:
            messages = [self._inert_message(message) for message in messages]
            tools = [
                replace(
                    tool,
                    name=self._inert(tool.name),
                    description=self._inert(tool.description),
                    parameters=self._inert(tool.parameters),
                )
                for tool in tools
            ]
            variables = self._inert(variables or {})
        except RecursionError as error:
            raise RequestError(
                "the model's chat template does not accept these messages: they are nested too deeply"
            ) from error
        if self._template is None:
            text = plain_chat(describe_tools(messages, tools))
            return self.encode(text.replace(CUT, " "), most=most)
        told = tools or any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if told and not self._knows_tools:
            messages, tools = describe_tools(messages, tools), ()
        text = template_process().render(
            self._tool_template if told and self._tool_template is not None else self._template,
            messages,
            tokens=self._special,
            continue_final=continue_final,
            tools=[tool.record() for tool in tools],
            variables=variables,
        )
        return self._encode_parts(text.split(CUT), most)

    def reasoning_opened(self, prompt: Sequence[int]) -> str:
        """The tag of reasoning that the template of a chat's prompt wrote, and the answer therefore lacks; else ""."""
        return opened("".join(map(self.piece, prompt[-_TAG_TOKENS:])))

    def _inert_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without control tokens, but for the tags around an answer's reasoning."""
        said = self._inert({key: value for key, value in message.items() if key != "content"})
        if message["role"] == "assistant":
            return {**said, "content": outside_tags(message["content"], self._inert_text)}
        content = self._inert_text(message["content"])
        if message["role"] == "tool":
            content = content.replace(RESULT_END, f"{RESULT_END[0]} {RESULT_END[1:]}")
        return {**said, "content": content}

    def _inert(self, value: Any) -> Any:
        """Data with a `CUT` in each text that the tokenizer would read as a control token."""
        if isinstance(value, str):
            return self._inert_text(value)
        if isinstance(value, Mapping):
            return {self._inert(key): self._inert(inside) for key, inside in value.items()}
        if isinstance(value, list | tuple):
            return [self._inert(inside) for inside in value]
        return value

    def _inert_text(self, text: str) -> str:
        text = self._marks.sub(rf"\g<0>{CUT}", encodable(text).replace(CUT, REPLACEMENT))
        if self._normalizes and self._marks.search(normal := self._normal(text)):
            text = self._marks.sub(rf"\g<0>{CUT}", normal)
        end = len(text.rstrip())
        tail = self._normal(text[max(0, end - self._longest) : end]).casefold()
        if any(tail[-length:] in self._begun for length in range(1, len(tail) + 1)):
            return text[:end] + CUT + text[end:]  # or what comes next might complete a control token
        return text

    @cached_property
    def _control(self) -> frozenset[str]:
        """The texts of control tokens: of added tokens but words, and HTML tags that the template does not write."""
        known = "".join((self._template or "", *TAGS))
        added = [
            token.content
            for token in self._fast.get_added_tokens_decoder().values()
            if token.special
            or not _ORDINARY.fullmatch(token.content)
            or (not token.content[0].isalnum() and token.content in known)
        ]
        texts = {*added, *self._special.values()}
        return frozenset(text for text in texts | set(map(self._normal, texts)) if len(text) > 1 and not text.isspace())

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return _first_of(self._control)

    @cached_property
    def _begun(self) -> frozenset[str]:
        """The beginnings of control tokens; a word's are those of ordinary words."""
        return frozenset(
            text[:length].casefold()
            for text in self._control
            if not text[0].isalnum()
            for length in range(1, len(text))
        )

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._control), default=0)

    @cached_property
    def _normalizes(self) -> bool:
        """Whether other texts may become a control token."""
        added = self._fast.get_added_tokens_decoder().values()
        return self._fast.normalizer is not None and any(token.normalized for token in added)

    def _normal(self, text: str) -> str:
        if not self._normalizes:
            return text
        with _contained("cannot normalize this text"):
            return str(self._fast.normalizer.normalize_str(text))

    def _encode_parts(self, parts: Sequence[str], most: int | None) -> list[int]:
        """Tokens of a text's parts, each encoded by itself."""
        with _contained("cannot encode this conversation"):
            self._check_length("".join(parts), most)
        if most is not None and len(parts) > most + 1:
            raise _too_long(most)
        first, *rest = parts
        known = {part: self._encode_further(part) for part in set(rest)}
        return self.encode(first, special=False) + [token for part in rest for token in known[part]]

    def _encode_further(self, text: str) -> list[int]:
        """Tokens of a text that follows another, without the space that some tokenizers put in front."""
        line = self._line_break
        both = self.encode(f"\n{text}", special=False)
        return both[len(line) :] if both[: len(line)] == line else self.encode(text, special=False)

    @cached_property
    def _line_break(self) -> list[int]:
        return self.encode("\n", special=False)

    def _check_length(self, text: str, most: int | None) -> None:
        """Raise if a text certainly has no room, without encoding all of it."""
        if most is None or len(text) <= USUAL_CHARACTERS * most + SLICE:
            return
        count = 0
        for begin in range(0, len(text), SLICE):
            count += len(self._fast.encode(text[begin : begin + SLICE], add_special_tokens=False).ids) - EDGE
            if count > most:
                raise _too_long(most)

    @cached_property
    def _knows_tools(self) -> bool:
        return self._tool_template is not None and template_process().knows_tools(self._tool_template)

    def _id_of(self, name: str) -> int | None:
        """Id of a special token; None if the tokenizer does not have it."""
        text = self._special.get(name)
        return None if text is None else self._fast.token_to_id(text)


def plain_chat(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one text: an answer continues what is before it, all else is a paragraph of its own."""
    text = ""
    for message in messages:
        text += ("\n\n" if text and message["role"] != "assistant" else "") + message["content"]
    return text


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


def _first_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern of the first character of any of these texts, in upper or lower case, wherever one stands.

    Gemma has 6,242 texts `<unused...>`. Those with one beginning share a branch, so that few are tried at each `<`.
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:_BEGINNING], []).append(re.escape(text[_BEGINNING:]))
    parts = (f"{re.escape(head[0])}(?={re.escape(head[1:])}(?:{'|'.join(rest)}))" for head, rest in branches.items())
    return re.compile("|".join(parts) or r"(?!)", re.IGNORECASE)


def _too_long(most: int) -> ContextOverflowError:
    return ContextOverflowError(
        f"the prompt has far more tokens than the {most} that the context holds, the answer included: "
        "shorten the conversation, or load the model with a longer context"
    )


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
