"""The settings: their meanings, sources, validation and storage.

A value comes from the first source that has it: a command-line flag, an environment variable `LOWBIT_CHAT_<KEY>`, the
settings file (TOML), the default. An invalid value is one error that names the key, where it was found, and what is
allowed.

There is no validation library on purpose: importing one costs 0.1 s of the 0.5 s within which the terminal UI must
paint, and there are only a few dozen flat values to check.
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
from types import MappingProxyType
from typing import Any

from app import paths
from runtime.compensation import (
    CHUNK,
    DEFAULT_BUDGET_PERCENT,
    DEFAULT_PROMPT_BUDGET_PERCENT,
    LARGEST_BUDGET_PERCENT,
)
from runtime.drafting import LARGEST_GAMMA, Drafts, Speculate
from runtime.kv.kinds import DEFAULT_KV, KINDS, KVKind

Value = str | int | float | None
ENV_PREFIX = "LOWBIT_CHAT_"
UNSET = "auto"
"""The text for "the program chooses"; in the file the key is simply absent."""
_ENDPOINT = ("endpoint", "endpoint_token")


DEFAULT_IDLE_MINUTES = 30
"""Minutes without use after which a model is unloaded."""


class SettingsError(Exception):
    """A setting is unknown or its value invalid, or the settings file can't be read or written.

    The message is one line with the key, where it was found, and what is allowed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The values that a setting allows."""

    kind: type
    """`str`, `int` or `float`."""
    meaning: str
    """The meaning for the user, as half a sentence."""
    choices: tuple[str, ...] = ()
    """The only allowed texts; empty for any."""
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    """Whether `low` itself is excluded."""
    optional: bool = False
    """Whether `auto` (None) is allowed."""
    secret: bool = False
    """Whether listings hide its value."""
    reload: bool = False
    """Whether a change takes effect only after a reload of the model."""

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
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
        """Convert input from a user, a file or a program to a value.

        Raises:
            ValueError: the value is invalid.
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


SAMPLING_DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.0, "repetition_penalty": 1.05}
)
"""Sampling where neither the settings nor the model's maker name a value."""


def _sampling(key: str, kind: type, meaning: str, **limits: Any) -> Any:
    default = f"auto: as the model's maker recommends, else {SAMPLING_DEFAULTS[key]:g}"
    return _setting(None, kind, f"{meaning}; {default}", optional=True, **limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. `None` means that the program chooses."""

    model: str | None = _setting(None, str, "model to load at start", optional=True)
    kv: KVKind = _setting(  # noqa: RUF009 -- makes a field
        DEFAULT_KV, str, "precision of the key-value cache", choices=tuple(KINDS), reload=True
    )
    context: int | None = _setting(
        None, int, "context length in tokens", low=1, high=10_000_000, optional=True, reload=True
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
        "delay of the first token that compensating the prompt may cost, in percent; 0 is off; "
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
        "draft tokens and verify several at a time; auto: drafts copied from the text where they pay, and by the model "
        "with a hierarchical cache where tune-device found that it pays; on: by the model always, with that cache",
        choices=("auto", "off", "on"),
        reload=True,
    )
    gamma: int | None = _setting(
        None,
        int,
        "tokens that the model drafts per round of speculation; auto: the fastest number",
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
        f"minutes without a request after which the model is unloaded until needed; 0 is never; auto: "
        f"{DEFAULT_IDLE_MINUTES}; from the next start",
        low=0,
        high=100_000,
        optional=True,
    )
    temperature: float | None = _sampling("temperature", float, "sampling temperature; 0 is greedy", low=0, high=2)
    top_p: float | None = _sampling(
        "top_p", float, "cumulative probability sampled from; 1 is all", low=0, high=1, above_low=True
    )
    top_k: int | None = _sampling("top_k", int, "number of tokens sampled from; 0 is all", low=0, high=10_000_000)
    min_p: float | None = _sampling(
        "min_p", float, "minimum probability relative to the best token; 0 is off", low=0, high=1
    )
    repetition_penalty: float | None = _sampling(
        "repetition_penalty", float, "penalty for repeated tokens; 1 is off, more breaks loops", low=1, high=2
    )
    max_tokens: int | None = _setting(
        None, int, "maximum length of an answer in tokens; auto: what fits", low=1, high=10_000_000, optional=True
    )
    system_prompt: str = _setting("", str, "instructions to the model before every chat")
    overflow: str = _setting(
        "drop",
        str,
        "what happens when a chat exceeds the context: its oldest messages are dropped, are "
        "summarized, or you are asked each time",
        choices=("drop", "summarize", "ask"),
    )
    history: str = _setting("on", str, "whether chats are saved on this machine", choices=("on", "off"))
    endpoint: str | None = _setting(
        None,
        str,
        "address of an OpenAI-compatible server to use instead of this machine; auto: this machine",
        optional=True,
    )
    endpoint_token: str = _setting("", str, "token for that server", secret=True)
    sidebar: str = _setting(
        "on", str, "whether the list of chats is shown next to the chat, if there is room", choices=("on", "off")
    )
    keys: str = _setting("", str, "other keys for actions: chat.new=f9, app.help=ctrl+x; F1 lists the actions")
    theme: str = _setting("dark", str, "colours of the terminal UI", choices=("dark", "light", "contrast", "terminal"))

    def __post_init__(self) -> None:
        for key, rule in RULES.items():
            object.__setattr__(self, key, _checked(key, rule, getattr(self, key), "the program"))

    @property
    def speculation(self) -> Speculate | None:
        """The drafts of the model that override any measurement; None if there are none, see `drafts`."""
        return Speculate(gamma=self.gamma) if self.speculate == "on" else None

    @property
    def drafts(self) -> Drafts:
        """The request for drafts."""
        return self.speculation or (None if self.speculate == "auto" else False)

    def sampling(self, recommended: Mapping[str, float] | None) -> dict[str, float]:
        """How answers are sampled: as set, else as recommended, else by `SAMPLING_DEFAULTS`.

        Args:
            recommended: what the model's maker recommends, by the same keys; None: unknown.
        """
        own = {key: getattr(self, key) for key in SAMPLING_DEFAULTS}
        known = {key: value for key, value in (recommended or {}).items() if key in SAMPLING_DEFAULTS}
        return {**SAMPLING_DEFAULTS, **known, **{key: value for key, value in own.items() if value is not None}}

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
            SettingsError: a key is unknown or a value invalid.
        """
        return dataclasses.replace(self, **{key: check(key, value) for key, value in changes.items()})  # type: ignore[arg-type]


RULES: Mapping[str, Rule] = {field.name: field.metadata["rule"] for field in dataclasses.fields(Settings)}
"""The rule of every setting, by key, in display order."""


def rule_of(key: str, where: str = "") -> Rule:
    """The rule of a key.

    Args:
        key: a setting's name.
        where: where the key was found, for the message.

    Raises:
        SettingsError: there is no such setting.
    """
    if key in RULES:
        return RULES[key]
    near = difflib.get_close_matches(key, RULES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(RULES)}"
    raise SettingsError(f"unknown setting {key!r}{f' in {where}' if where else ''}: {hint}")


def _checked(key: str, rule: Rule, value: object, where: str) -> Value:
    try:
        return rule.parse(value)
    except (ValueError, OverflowError):
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "…"
        raise SettingsError(f"{key} = {shown} (from {where}) is invalid; allowed: {rule.allowed}") from None


def check(key: str, value: object, where: str = "what was given") -> Value:
    """Parse and check one value.

    Raises:
        SettingsError: the key is unknown or the value invalid.
    """
    return _checked(key, rule_of(key), value, where)


def _check_endpoint(values: Mapping[str, Value]) -> None:
    """Raise SettingsError if the address is invalid or unsafe for the token."""
    from app.remote import endpoint_problem

    url, token = (values.get(key) for key in _ENDPOINT)
    if url and (problem := endpoint_problem(str(url), str(token or ""))) is not None:
        raise SettingsError(f"endpoint: {problem}")


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
    """Load the settings from flags, environment, file and defaults, in this order of precedence.

    Args:
        flags: values from the command line; None for a flag that was not given.
        file: the settings file; by default `paths.settings_file()`.

    Raises:
        SettingsError: one line about the first invalid value.
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
    """Write settings to the file atomically. The rest of the file stays, including comments.

    Args:
        changes: new values by key; None (or `auto`) removes an optional key from the file.
        file: the settings file; by default `paths.settings_file()`.

    Raises:
        SettingsError: a key is unknown, a value is invalid, or the file can't be read or written.
    """
    import tomlkit

    file = file or paths.settings_file()
    checked = {key: check(key, value) for key, value in changes.items()}
    before = _read(file)
    if not checked.keys().isdisjoint(_ENDPOINT):
        kept = {key: check(key, before[key], str(file)) for key in _ENDPOINT if key in before}
        _check_endpoint({**kept, **checked})
    try:
        document = tomlkit.parse(file.read_text(encoding="utf-8")) if file.exists() else tomlkit.document()
        for key, value in checked.items():
            if value is None:
                document.pop(key, None)
            else:
                document[key] = value
        paths.write_atomically(file.resolve(), tomlkit.dumps(document))  # a symlink stays a symlink
    except OSError as error:
        raise SettingsError(f"cannot write the settings file {file}: {error}") from error
