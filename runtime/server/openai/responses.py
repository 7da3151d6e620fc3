"""Responses of the OpenAI protocol: bodies, and the chunks of a stream."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from runtime.engine.generation import Piece, Speculation, Usage
from runtime.load.loading import Accepted
from runtime.server.records import Scored
from runtime.text.call_reader import CallReader, Found
from runtime.text.reasoning import ReasoningReader
from runtime.text.sampling import TokenLogprob
from runtime.wire.answers import SpeculationRecord, Timings
from runtime.wire.codec import to_json

Body = dict[str, Any]
_THOUGHT = "reasoning_content"
"""The field of reasoning, as in the interfaces of DeepSeek, llama.cpp and vLLM."""


def usage_body(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class _Answer:
    """Fields shared by all bodies and chunks of a response."""

    def __init__(self, prefix: str, accepted: Accepted, *, version: str, with_usage: bool) -> None:
        self._with_usage = with_usage
        self._accepted = accepted
        self._head: Body = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": accepted.model,
            "system_fingerprint": f"lowbit-chat-{version}-{accepted.backend}",
        }

    def _body(self, kind: str, choices: list[Body], usage: Usage | None = None) -> Body:
        body: Body = {"object": kind, **self._head, "choices": choices}
        if usage is not None:
            body["usage"] = self._usage(usage)
            body["timings"] = self._timings(usage)
        return body

    def _usage(self, usage: Usage) -> Body:
        return usage_body(usage)

    def _chunk(self, kind: str, choice: Body, usage: Usage | None) -> Body:
        body: Body = {"object": kind, **self._head, "choices": [choice]}
        if self._with_usage:
            body["usage"] = None
        if usage is not None:
            body["timings"] = self._timings(usage)
        return body

    def _timings(self, usage: Usage) -> Body:
        """Data beyond OpenAI's: time to first token, tokens per second, compensation and its cost."""
        timings = Timings(
            ttft_s=usage.ttft_s,
            prefill_tokens_per_s=usage.prefill_tokens_per_s,
            decode_tokens_per_s=usage.decode_tokens_per_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            k_chunk=self._accepted.k_chunk,
            slowdown_percent=self._accepted.slowdown_percent,
            prompt_slowdown_percent=self._accepted.prompt_slowdown_percent,
            speculation=speculation_record(usage.speculation),
        )
        body: Body = to_json(timings)
        return body

    def _usage_chunks(self, kind: str, usage: Usage | None) -> list[Body]:
        """The chunk of `stream_options.include_usage`, after the last piece."""
        if usage is None or not self._with_usage:
            return []
        return [{"object": kind, **self._head, "choices": [], "usage": self._usage(usage)}]


def speculation_record(counts: Speculation | None) -> SpeculationRecord | None:
    """Speculation statistics of the answer."""
    if counts is None:
        return None
    return SpeculationRecord(
        gamma=counts.gamma,
        acceptance_rate=counts.acceptance_rate,
        tokens_per_verify=counts.tokens_per_verify,
        source=counts.source,
    )


class PartReader:
    """Separates reasoning, text and calls of an answer."""

    def __init__(self, opening: str, calls: CallReader | None, *, apart: bool = True) -> None:
        """Begin an answer.

        Args:
            opening: What of it the prompt already has.
            calls: Parses calls, if there are tools.
            apart: Whether reasoning is separated; else it is text, between its tags.
        """
        self._reasoning, self._calls = ReasoningReader() if apart else None, calls
        self._opening = opening if apart else ""
        self.begun = "" if apart else opening
        """The beginning of the text."""
        self.thoughts = 0
        """Tokens of reasoning so far."""

    @property
    def calls(self) -> int:
        """Calls so far."""
        return 0 if self._calls is None else self._calls.count

    def read(self, piece: Piece) -> tuple[str, str, list[Found]]:
        """The reasoning and the text that are certain, and calls that the piece completes or continues."""
        thought, text, last = "", piece.text, piece.finish_reason is not None
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(self._opening + text, last=last)
            self._opening = ""
            self.thoughts += piece.token is not None and self._reasoning.inside is True
        if self._calls is None:
            return thought, text, []
        text, pieces = self._calls.feed(text)
        if last:
            rest, more = self._calls.finish()
            text, pieces = text + rest, [*pieces, *more]
        return thought, text, pieces


class ChatWriter(_Answer):
    """Writes responses of /v1/chat/completions."""

    BODY, CHUNK = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        accepted: Accepted,
        parts: PartReader,
        *,
        version: str,
        with_usage: bool = False,
        logprobs: bool = False,
    ) -> None:
        """Start a response; `parts` separates the answer's parts."""
        super().__init__("chatcmpl", accepted, version=version, with_usage=with_usage)
        self._logprobs, self._parts = logprobs, parts

    def opening(self) -> list[Body]:
        """The chunk with the role."""
        return [self._choice({"role": "assistant", "content": self._parts.begun}, None)]

    def chunks(self, piece: Piece) -> list[Body]:
        """The chunks of a piece; empty if it adds nothing."""
        index = self._parts.calls - 1
        thought, text, calls = self._parts.read(piece)
        deltas: list[Body] = [{name: said} for name, said in ((_THOUGHT, thought), ("content", text)) if said]
        for call in calls:
            index += call.name is not None
            deltas.append({"tool_calls": [{"index": index, **_call(call)}]})
        if not deltas and piece.logprob is None and piece.finish_reason is None:
            return []
        *early, last = deltas or [{}]
        told = [*(self._choice(delta, None) for delta in early), self._choice(last, piece)]
        return told + self._usage_chunks(self.CHUNK, piece.usage)

    def body(self, pieces: Sequence[Piece]) -> Body:
        """The body of a non-streaming response."""
        parts = [self._parts.read(piece) for piece in pieces]
        thought, text = "".join(part[0] for part in parts), self._parts.begun + "".join(part[1] for part in parts)
        calls: list[Body] = []
        for call in (call for part in parts for call in part[2]):
            if call.name is not None:
                calls.append(_call(call))
            else:
                calls[-1]["function"]["arguments"] += call.arguments
        message: Body = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if thought:
            message[_THOUGHT] = thought
        if calls:
            message["tool_calls"] = calls
        choice: Body = {
            "index": 0,
            "message": message,
            "logprobs": _chat_logprobs(_logprobs(pieces)) if self._logprobs else None,
            "finish_reason": self._finish(pieces[-1]),
        }
        return self._body(self.BODY, [choice], pieces[-1].usage)

    def _usage(self, usage: Usage) -> Body:
        return {**usage_body(usage), "completion_tokens_details": {"reasoning_tokens": self._parts.thoughts}}

    def _finish(self, piece: Piece) -> str | None:
        """The reason for the end of the answer; None if it continues."""
        return "tool_calls" if self._parts.calls and piece.finish_reason == "stop" else piece.finish_reason

    def _choice(self, delta: Body, piece: Piece | None) -> Body:
        choice: Body = {
            "index": 0,
            "delta": delta,
            "logprobs": None if piece is None or piece.logprob is None else _chat_logprobs([piece.logprob]),
            "finish_reason": None if piece is None else self._finish(piece),
        }
        return self._chunk(self.CHUNK, choice, None if piece is None else piece.usage)


class CompletionWriter(_Answer):
    """Writes responses of /v1/completions."""

    KIND: Literal["text_completion"] = "text_completion"

    def __init__(self, accepted: Accepted, *, version: str, with_usage: bool = False, logprobs: bool = False) -> None:
        super().__init__("cmpl", accepted, version=version, with_usage=with_usage)
        self._logprobs = logprobs
        self._offset = 0

    def opening(self) -> list[Body]:
        """Empty: nothing precedes the text."""
        return []

    def chunks(self, piece: Piece) -> list[Body]:
        """The chunks of a piece; empty if it adds nothing."""
        if not piece.text and piece.logprob is None and piece.finish_reason is None:
            return []
        logprobs = None if piece.logprob is None else self._completion_logprobs([piece.logprob])
        choice = {"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return [self._chunk(self.KIND, choice, piece.usage), *self._usage_chunks(self.KIND, piece.usage)]

    def body(self, pieces: Sequence[Piece]) -> Body:
        """The body of a non-streaming response."""
        choice: Body = {
            "index": 0,
            "text": _text(pieces),
            "logprobs": self._completion_logprobs(_logprobs(pieces)) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }
        return self._body(self.KIND, [choice], pieces[-1].usage)

    def _completion_logprobs(self, logprobs: Sequence[TokenLogprob]) -> Body:
        found = completion_logprobs(logprobs, self._offset)
        self._offset += sum(len(logprob.text) for logprob in logprobs)
        return found


def completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int = 0) -> Body:
    """As /v1/completions has them, texts beginning at `offset`; none of a token that has nothing before it."""
    ends = itertools.accumulate((len(logprob.text) for logprob in logprobs), initial=offset)
    known = [not math.isnan(logprob.logprob) for logprob in logprobs]
    return {
        "tokens": [logprob.text for logprob in logprobs],
        "token_logprobs": [one.logprob if has else None for one, has in zip(logprobs, known, strict=True)],
        "top_logprobs": [
            {other.text: other.logprob for other in one.top} if has else None
            for one, has in zip(logprobs, known, strict=True)
        ],
        "text_offset": list(ends)[:-1],
    }


def scored_body(scored: Sequence[Scored], *, logprobs: bool) -> Body:
    """The body of /v1/completions with `echo`: a choice for each prompt."""
    prompts, total = (sum(each) for each in zip(*((one.prompt_tokens, len(one.tokens)) for one in scored), strict=True))
    return {
        "object": CompletionWriter.KIND,
        "id": f"cmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": scored[0].model,
        "choices": [
            {
                "index": index,
                "text": one.text,
                "logprobs": completion_logprobs(one.tokens) if logprobs else None,
                "finish_reason": "length",
            }
            for index, one in enumerate(scored)
        ],
        "usage": {"prompt_tokens": prompts, "completion_tokens": total - prompts, "total_tokens": total},
    }


def call_id() -> str:
    """A call id, which its result refers to: nine letters and digits, which even Mistral's chat templates take."""
    return uuid.uuid4().hex[:9]


def _call(call: Found) -> Body:
    """A call in the format of chat completions, or a piece of one."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _logprobs(pieces: Sequence[Piece]) -> list[TokenLogprob]:
    return [piece.logprob for piece in pieces if piece.logprob is not None]


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Body:
    return {"content": logprobs_content(logprobs), "refusal": None}


def logprobs_content(logprobs: Sequence[TokenLogprob]) -> list[Body]:
    """Log-probabilities of tokens, each with the most likely ones at its place."""
    return [
        {
            **_token(logprob.text, logprob.logprob),
            "top_logprobs": [_token(other.text, other.logprob) for other in logprob.top],
        }
        for logprob in logprobs
    ]


def _token(text: str, logprob: float) -> Body:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
