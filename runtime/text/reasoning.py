"""A model's reasoning: what it writes between tags before its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

TAGS = ("<think>", "</think>")
"""The tags that reasoning models write around their reasoning."""


def split_reasoning(text: str) -> tuple[str, str]:
    """Split a text into reasoning and answer. Unfinished reasoning has no answer yet."""
    if not text.lstrip().startswith(TAGS[0]):
        return "", text
    inside = text.lstrip().removeprefix(TAGS[0])
    thought, ended, answer = inside.partition(TAGS[1])
    return thought.strip("\n"), answer.lstrip("\n") if ended else ""


def unfinished(text: str) -> bool:
    """Whether a text ends inside its reasoning."""
    return text.lstrip().startswith(TAGS[0]) and TAGS[1] not in text


class ReasoningReader:
    """Separates reasoning from the answer in a streamed text. What may become a tag is held back."""

    def __init__(self) -> None:
        self._held = ""
        self._inside: bool | None = None  # None: not known yet
        self._blank = True  # whether line breaks at the beginning are still to be left out

    @property
    def inside(self) -> bool | None:
        """Whether the text so far ends inside reasoning; None: not known yet."""
        return self._inside

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add a piece. Returns the reasoning and the answer that are certain; with `last`, all of them."""
        self._held += text
        if self._inside is None:
            begun = self._held.lstrip()
            if not last and begun != TAGS[0] and TAGS[0].startswith(begun):
                return "", ""
            self._inside = begun.startswith(TAGS[0])
            self._held, self._blank = begun.removeprefix(TAGS[0]) if self._inside else self._held, self._inside
        thought = ""
        if self._inside:
            inside, ended, behind = self._held.partition(TAGS[1])
            sure = inside if ended or last else inside[: len(inside) - _tail(inside)]
            thought, self._held = self._trimmed(sure.rstrip("\n") if ended or last else sure), self._held[len(sure) :]
            if not ended:
                return thought, ""
            self._inside, self._blank, self._held = False, True, behind
        answer, self._held = self._trimmed(self._held), ""
        return thought, answer

    def _trimmed(self, text: str) -> str:
        text = text.lstrip("\n") if self._blank else text
        self._blank = self._blank and not text
        return text


def _tail(text: str) -> int:
    """Characters at the end of reasoning that may belong to its closing tag, and line breaks before it."""
    tag = next((size for size in range(len(TAGS[1]) - 1, 0, -1) if text.endswith(TAGS[1][:size])), 0)
    plain = text[: len(text) - tag]
    return tag + len(plain) - len(plain.rstrip("\n"))


def outside_tags(text: str, change: Callable[[str], str]) -> str:
    """A text with all changed but the tags around its reasoning."""
    before, begun, inside = text.partition(TAGS[0])
    if not begun or before.strip():
        return change(text)
    thought, ended, answer = inside.partition(TAGS[1])
    return before + begun + change(thought) + ended + change(answer)


def opened(prompt: str) -> str:
    """The tag and line break that a prompt ends with where its template begins the reasoning; empty where it does not.

    The model continues the reasoning, so its answer lacks the tag.
    """
    return f"{TAGS[0]}\n" if prompt.rstrip().endswith(TAGS[0]) else ""


def switch(thinking: str) -> Mapping[str, bool | str] | None:
    """The variables of chat templates that turn reasoning on or off; None leaves it to the template.

    Qwen3, SmolLM3 and GLM read the first one, Granite and DeepSeek the second. gpt-oss reads the third: it always
    reasons, a little or a lot.

    Args:
        thinking: `auto`, `on` or `off`.
    """
    if thinking == "auto":
        return None
    on = thinking == "on"
    return {"enable_thinking": on, "thinking": on, "reasoning_effort": "high" if on else "low"}
