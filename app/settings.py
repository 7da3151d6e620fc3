"""The settings: what each means, where it may come from, and how it is checked and kept.

A value comes from the first of these that has it: a flag of the command line, an environment variable
`LOWBIT_CHAT_<KEY>`, the settings file (TOML), the default. A value that is not acceptable is one error that names the
key, where it was found and what is allowed.

Written without a validation library on purpose: importing one costs 0.1 s of the 0.5 s in which the terminal UI has to
paint, and there is a dozen of flat values to check.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import paths
from runtime.compensation import (
    CHUNK,
    DEFAULT_BUDGET_PERCENT,
    DEFAULT_PROMPT_BUDGET_PERCENT,
    LARGEST_BUDGET_PERCENT,
)
from runtime.drafting import LARGEST_GAMMA, Drafts, Speculate
from runtime.kv.kinds import KINDS, KVKind

Value = str | int | float | None
ENV_PREFIX = "LOWBIT_CHAT_"
UNSET = "auto"
"""What a person writes for "the program chooses"; in the file the key is simply absent."""


DEFAULT_IDLE_MINUTES = 30
"""Minutes after which a model that nobody uses leaves memory."""


class SettingsError(Exception):
    """A setting is unknown or its value not acceptable, or the settings file cannot be read or written.

    The message is one line that says which key, where it was found, and what is allowed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What values a setting takes."""

    kind: type
    """`str`, `int` or `float`."""
    meaning: str
    """For a person, half a sentence."""
    choices: tuple[str, ...] = ()
    """The only acceptable texts; empty: any."""
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    """Whether `low` itself is excluded."""
    optional: bool = False
    """Whether `auto` (None) is acceptable."""
    secret: bool = False
    """Whether its value is not for lists that others may see."""
    reload: bool = False
    """Whether a change takes effect only when the model is loaded again."""

    @property
    def allowed(self) -> str:
        """The acceptable values, in words."""
        if self.choices:
            words = ", ".join(self.choices)
        elif self.kind is str:
            words = "any text"
        else:
            noun = "a whole number" if self.kind is int else "a number"
            words = f"{noun} {'above' if self.above_low else 'from'} {self.low:g} to {self.high:g}"
            words = words if self.high < 1e6 else f"{noun} from {self.low:g}"
        return f"{words}, or {UNSET}" if self.optional else words

    def parse(self, value: object) -> Value:
        """Turn what a person, a file or a program gave into a value of this kind.

        Raises:
            ValueError: the value is not acceptable.
        """
        if self.optional and (value is None or value == UNSET):
            return None
        if self.kind is str:
            if not isinstance(value, str) or (self.choices and value not in self.choices):
                raise ValueError
            return value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        number: int | float = float(value)
        if self.kind is int:
            if not math.isfinite(number) or number != int(number):
                raise ValueError
            number = int(number)
        if not self.low <= number <= self.high or (self.above_low and number == self.low):
            raise ValueError
        return number


def _setting(default: Value, kind: type, meaning: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={"rule": Rule(kind=kind, meaning=meaning, **limits)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a person can set. `None` means that the program chooses."""

    model: str | None = _setting(None, str, "model to load at start", optional=True)
    kv: KVKind = _setting(  # noqa: RUF009 -- makes a field
        "fp16", str, "precision of the key-value cache", choices=tuple(KINDS), reload=True
    )
    context: int | None = _setting(
        None, int, "tokens that fit a chat", low=1, high=10_000_000, optional=True, reload=True
    )
    budget: float | None = _setting(
        None,
        float,
        f"slowdown that compensation may cost, in percent; 0 is off; auto: {DEFAULT_BUDGET_PERCENT:g}",
        low=0,
        high=LARGEST_BUDGET_PERCENT,
        optional=True,
    )
    prompt_budget: float | None = _setting(
        None,
        float,
        "how much longer the first word may take for a better read prompt, in percent; 0 is off; "
        f"auto: {DEFAULT_PROMPT_BUDGET_PERCENT:g}",
        low=0,
        high=LARGEST_BUDGET_PERCENT,
        optional=True,
    )
    k_chunk: int | None = _setting(
        None,
        int,
        "compensated channels per 1024; 0 is none; auto: what the budget allows",
        low=0,
        high=CHUNK,
        optional=True,
    )
    speculate: str = _setting(
        "auto",
        str,
        "draft tokens and verify several at a time; auto: with a hierarchical cache, where tune-device found that it "
        "pays; on: always, with that cache",
        choices=("auto", "off", "on"),
        reload=True,
    )
    gamma: int | None = _setting(
        None,
        int,
        "tokens drafted in each round of speculation; auto: what is fastest",
        low=1,
        high=LARGEST_GAMMA,
        optional=True,
        reload=True,
    )
    num_parallel: int | None = _setting(
        None,
        int,
        "requests answered at the same time; auto: up to 4, as memory allows",
        low=1,
        high=64,
        optional=True,
        reload=True,
    )
    backend: str = _setting(
        "auto", str, "what runs the model", choices=("auto", "triton", "cpu", "reference"), reload=True
    )
    idle_unload: int | None = _setting(
        None,
        int,
        f"minutes without a request after which the model leaves memory until it is needed again; 0 is never; auto: "
        f"{DEFAULT_IDLE_MINUTES}; from the next start",
        low=0,
        high=100_000,
        optional=True,
    )
    temperature: float = _setting(0.7, float, "spread of sampling; 0 is greedy", low=0, high=2)
    top_p: float = _setting(0.95, float, "share of probability sampled from; 1 is all", low=0, high=1, above_low=True)
    top_k: int = _setting(40, int, "most tokens sampled from; 0 is all", low=0, high=10_000_000)
    min_p: float = _setting(0.0, float, "least odds against the best token; 0 is off", low=0, high=1)
    repetition_penalty: float = _setting(
        1.05, float, "how much less likely what was said before becomes; 1 is off, more breaks loops", low=1, high=2
    )
    max_tokens: int | None = _setting(
        None, int, "longest answer in tokens; auto: what fits", low=1, high=10_000_000, optional=True
    )
    system_prompt: str = _setting("", str, "said to the model before every chat")
    overflow: str = _setting(
        "drop",
        str,
        "what happens when a chat is longer than the context: its oldest messages are no longer read (drop), are "
        "summarized, or you are asked each time",
        choices=("drop", "summarize", "ask"),
    )
    history: str = _setting(
        "on", str, "whether chats are kept on this machine, to be found again", choices=("on", "off")
    )
    endpoint: str | None = _setting(
        None,
        str,
        "address of a server that answers in the place of this machine (OpenAI's protocol); auto: this machine",
        optional=True,
    )
    endpoint_token: str = _setting("", str, "what that server wants to be shown", secret=True)
    sidebar: str = _setting(
        "on", str, "whether other chats stand beside the one in sight, where there is room", choices=("on", "off")
    )
    keys: str = _setting("", str, "other keys for actions: chat.new=f9, app.help=ctrl+x; F1 lists the actions")
    theme: str = _setting("dark", str, "colours of the terminal UI", choices=("dark", "light", "contrast", "terminal"))

    def __post_init__(self) -> None:
        for key, rule in RULES.items():
            object.__setattr__(self, key, _checked(key, rule, getattr(self, key), "the program"))

    @property
    def speculation(self) -> Speculate | None:
        """How tokens are to be drafted whatever was measured; None: see `drafts`."""
        return Speculate(gamma=self.gamma) if self.speculate == "on" else None

    @property
    def drafts(self) -> Drafts:
        """How drafts are asked for."""
        return self.speculation or (None if self.speculate == "auto" else False)

    def get(self, key: str) -> Value:
        """The value of a key.

        Raises:
            SettingsError: there is no such setting.
        """
        rule_of(key)
        value: Value = getattr(self, key)
        return value

    def changed(self, changes: Mapping[str, object]) -> Settings:
        """A copy with some values replaced.

        Raises:
            SettingsError: a key is unknown or a value not acceptable.
        """
        return dataclasses.replace(self, **{key: check(key, value) for key, value in changes.items()})  # type: ignore[arg-type]


RULES: Mapping[str, Rule] = {field.name: field.metadata["rule"] for field in dataclasses.fields(Settings)}
"""The rule of every setting, by key, in the order in which they are shown."""


def rule_of(key: str, where: str = "") -> Rule:
    """The rule of a key.

    Args:
        key: a setting's name.
        where: the place in which the key was found, for the message.

    Raises:
        SettingsError: there is no such setting.
    """
    if key in RULES:
        return RULES[key]
    near = difflib.get_close_matches(key, RULES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(RULES)}"
    raise SettingsError(f"unknown setting {key!r}{f' in {where}' if where else ''}: {hint}")


def _checked(key: str, rule: Rule, value: object, where: str) -> Value:
    try:
        return rule.parse(value)
    except (ValueError, OverflowError):
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "…"
        raise SettingsError(f"{key} = {shown} (from {where}) is not acceptable; allowed: {rule.allowed}") from None


def check(key: str, value: object, where: str = "what was given") -> Value:
    """Parse and check one value.

    Raises:
        SettingsError: the key is unknown or the value not acceptable.
    """
    return _checked(key, rule_of(key), value, where)


def _read(file: Path) -> dict[str, object]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the settings file {file}: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"the settings file {file} is not valid TOML: {error}; correct or delete it") from error


def load(flags: Mapping[str, object] | None = None, *, file: Path | None = None) -> Settings:
    """Gather the settings: flags, then environment, then the file, then the defaults.

    Args:
        flags: values of the command line; a None is a flag that was not given.
        file: the settings file; by default `paths.settings_file()`.

    Raises:
        SettingsError: one line about the first value that is not acceptable.
    """
    file = file or paths.settings_file()
    values: dict[str, Any] = {}
    for key, value in _read(file).items():
        rule_of(key, str(file))
        values[key] = check(key, value, str(file))
    for key in RULES:
        variable = ENV_PREFIX + key.upper()
        if text := os.environ.get(variable, ""):
            values[key] = check(key, text, f"the environment variable {variable}")
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = check(key, value, f"--{key.replace('_', '-')}")
    return Settings(**values)


def save(changes: Mapping[str, object], *, file: Path | None = None) -> None:
    """Write some settings into the file, all or nothing; the rest of the file stays, comments included.

    Args:
        changes: new values by key; None (or `auto`) takes an optional key out of the file.
        file: the settings file; by default `paths.settings_file()`.

    Raises:
        SettingsError: a key is unknown, a value not acceptable, or the file cannot be read or written.
    """
    import tomlkit

    file = file or paths.settings_file()
    checked = {key: check(key, value) for key, value in changes.items()}
    _read(file)
    try:
        document = tomlkit.parse(file.read_text(encoding="utf-8")) if file.exists() else tomlkit.document()
        for key, value in checked.items():
            if value is None:
                document.pop(key, None)
            else:
                document[key] = value
        paths.write_whole(file.resolve(), tomlkit.dumps(document))  # a link stays a link
    except OSError as error:
        raise SettingsError(f"cannot write the settings file {file}: {error}") from error
