"""The measured models, each with a suitable text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from assets import calibration_text, demo_checkpoint_path
from models.recipe import DEFAULT_GROUP_SIZE
from runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data"
"""Real models and texts beside the repository; without them only the bundled model is measured."""
SMOLLM2 = ROOT / "build" / "smollm2"
"""Hugging Face folder of SmolLM2-135M-Instruct, unless `--smollm2` names another."""
WINDOW, STRIDE = 256, 128
"""Tokens of a window, and from one window's start to the next, of the small models."""

_STORY_END = "<|endoftext|>"
_CALIBRATION_CHARACTERS = 120_000
_CLOSER = ("rtn", "awq", "squeezellm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and its texts."""

    name: str
    """What the report calls it."""
    folder: Path
    """Its checkpoint."""
    group_size: int
    """Input channels that share a scale; narrow models need narrow groups."""
    tokens: int
    """Tokens of the evaluation text."""
    about: str
    """The model, in a few words."""
    evaluated: str
    """The evaluation text, in words."""
    calibrated: str
    """The calibration text, in words."""
    closer: Sequence[str]
    """Methods of the comparisons of selectors and of residuals: the paper's two and the plain one at most."""
    encode: Callable[[Tokenizer, int], list[int]]
    """The evaluation text's first so many tokens."""
    calibration: Callable[[], str]
    """The calibration text."""
    window: int = WINDOW
    """Tokens of a window."""
    stride: int = STRIDE
    """Tokens from one window's start to the next."""

    def there(self) -> bool:
        """Whether the checkpoint and its texts are on this machine."""
        return (self.folder / "config.json").is_file() and (self.folder == demo_checkpoint_path() or DATA.is_dir())

    def text(self, limit: int | None = None) -> list[int]:
        """The evaluation text as tokens.

        Args:
            limit: Most tokens; None for `tokens`.
        """
        count = min(self.tokens, limit or self.tokens)
        return self.encode(Tokenizer(self.folder), count)[:count]


def wikitext(tokenizer: Tokenizer, count: int) -> list[int]:
    """The beginning of WikiText-2's test text, which has at least so many tokens."""
    return tokenizer.encode(_read("wikitext2-test.txt")[: 16 * count])


def smollm2(folder: Path = SMOLLM2) -> Case:
    """The real chat model.

    Args:
        folder: Checkpoint of SmolLM2-135M-Instruct.
    """
    return Case(
        name="smollm2",
        folder=folder,
        group_size=DEFAULT_GROUP_SIZE,
        tokens=2000,
        about="SmolLM2-135M-Instruct: Llama, 135 M parameters, hidden 576, 30 blocks, vocabulary 49,152",
        evaluated="WikiText-2 test",
        calibrated="the bundled calibration text",
        closer=("rtn",),
        encode=wikitext,
        calibration=calibration_text,
        window=512,
        stride=256,
    )


def _stories() -> list[str]:
    return [story.strip() for story in _read("tinystories.txt").split(_STORY_END) if story.strip()]


def _one_line(story: str) -> str:
    """A story as the model of characters was taught it: its vocabulary has no line break."""
    return " ".join(story.split())


def _each_story(change: Callable[[str], str]) -> Callable[[Tokenizer, int], list[int]]:
    """Stories one after another, each with its own beginning-of-sequence token, as in training."""

    def encode(tokenizer: Tokenizer, count: int) -> list[int]:
        tokens: list[int] = []
        for story in _stories():
            if len(tokens) >= count:
                break
            tokens += tokenizer.encode(change(story))
        return tokens

    return encode


def _last_stories(change: Callable[[str], str], between: str) -> Callable[[], str]:
    """Stories from the end of the file, which the evaluation does not reach."""

    def text() -> str:
        stories = [change(story) for story in _stories()]
        kept: list[str] = []
        while stories and sum(map(len, kept)) < _CALIBRATION_CHARACTERS:
            kept.append(stories.pop())
        return between.join(kept)

    return text


def _held_out(tokenizer: Tokenizer, count: int) -> list[int]:
    from assets.demo_model.pack import dialogues

    return tokenizer.encode(dialogues("held_out", 40 + count // 60))


def _taught() -> str:
    from assets.demo_model.pack import dialogues

    return dialogues("train", 400)


def _read(name: str) -> str:
    return (DATA / "text" / name).read_text(encoding="utf-8")


CASES: Sequence[Case] = (
    Case(
        name="english3m",
        folder=DATA / "models" / "english3m",
        group_size=128,
        tokens=8000,
        about="Llama, 3.4 M parameters, hidden 256, 4 blocks, vocabulary 4096",
        evaluated="WikiText-2 test",
        calibrated="WikiText-2 valid",
        closer=_CLOSER,
        encode=wikitext,
        calibration=lambda: _read("wikitext2-valid.txt")[:_CALIBRATION_CHARACTERS],
    ),
    Case(
        name="demo",
        folder=demo_checkpoint_path(),
        group_size=128,
        tokens=12000,
        about="the bundled model: Llama, 2.9 M parameters, hidden 256, 4 blocks, vocabulary 2048",
        evaluated="its held-out dialogues",
        calibrated="its training dialogues",
        closer=("rtn",),
        encode=_held_out,
        calibration=_taught,
    ),
    Case(
        name="babyllama105",
        folder=DATA / "models" / "babyllama105",
        group_size=32,
        tokens=12000,
        about="Llama, 0.94 M parameters, hidden 128, 5 blocks, 105 characters",
        evaluated="TinyStories, each story a sequence of its own on one line",
        calibrated="other TinyStories",
        closer=_CLOSER,
        encode=_each_story(_one_line),
        calibration=_last_stories(_one_line, " "),
    ),
    Case(
        name="stories260k",
        folder=DATA / "models" / "stories260k",
        group_size=32,
        tokens=12000,
        about="Llama, 0.26 M parameters, hidden 64, 5 blocks, vocabulary 512",
        evaluated="TinyStories, each story a sequence of its own",
        calibrated="other TinyStories",
        closer=_CLOSER,
        encode=_each_story(str),
        calibration=_last_stories(str, "\n"),
    ),
)
