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
