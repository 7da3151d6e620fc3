"""The settings: their meanings, sources, validation and storage.

A value comes from the first source that has it: a command-line flag, an environment variable `LOWBIT_CHAT_<KEY>`, the
settings file (TOML), the default. An invalid value is one error that names the key, where it was found, and what is
allowed.

What a field allows is its annotation; the codec of `runtime.wire` reads it, as it reads those of records. There is no
validation library on purpose: importing pydantic takes 40 ms of the 0.5 s within which the terminal UI must paint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from app import paths
from app.errors import hint
from app.language import _
from runtime.compensation import (
    CHUNK,
    DEFAULT_BUDGET_PERCENT,
    DEFAULT_PROMPT_BUDGET_PERCENT,
    LARGEST_BUDGET_PERCENT,
    Compensation,
    Exact,
    of_settings,
)
from runtime.drafting import LARGEST_GAMMA, Drafts, Speculate
from runtime.kv.kinds import DEFAULT_KV, KVKind
from runtime.server import MAX_MODELS
from runtime.wire.codec import OneOf, Within, from_json

if TYPE_CHECKING:
    from runtime.wire.requests import LoadRequest

Value = str | int | float | None
ENV_PREFIX = "LOWBIT_CHAT_"
UNSET = "auto"
"""The text for "the program chooses"; in the file the key is simply absent."""
_ENDPOINT = ("endpoint", "endpoint_token")


DEFAULT_IDLE_MINUTES = 30
"""Minutes without use after which a model is unloaded."""
_ANSWERS = 2
"""Answers at a time: one person reads one, and may leave another to be written."""


class SettingsError(Exception):
    """A setting is unknown or its value invalid, or the settings file can't be read or written.

    The message is one line with the key, where it was found, and what is allowed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The values that a setting allows, as its annotation says, and its meaning."""

    annotation: Any
    """The field's, as `runtime.wire.codec` reads it."""
    kind: type
    """`str`, `int` or `float`."""
    limit: Within | OneOf | None
    """Which of these."""
    optional: bool
    """Whether `auto` (None) is allowed."""
    also: tuple[str, ...]
    """Texts that are allowed beside numbers."""
    meaning: str
    """The meaning for the user, as half a sentence."""
    secret: bool = False
    """Whether listings hide its value."""
    reload: bool = False
    """Whether a change takes effect only after a reload of the model."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The only allowed texts; empty for any."""
        return self.limit.values if isinstance(self.limit, OneOf) else ()

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if isinstance(self.limit, Within):
            low, high = self.limit.low, self.limit.high
            whole, above, open_ended = self.kind is int, self.limit.above, high >= 1e6
            if open_ended:
                words = _("a whole number from {low:g}", low=low) if whole else _("a number from {low:g}", low=low)
            elif above:
                words = _("a number above {low:g} to {high:g}", low=low, high=high)
            elif whole:
                words = _("a whole number from {low:g} to {high:g}", low=low, high=high)
            else:
                words = _("a number from {low:g} to {high:g}", low=low, high=high)
        else:
            words = _("one of {choices}", choices=", ".join(self.choices)) if self.choices else _("text")
        for choice in (*self.also, *([UNSET] if self.optional else [])):
            words = _("{words}, or {choice}", words=words, choice=choice)
        return words

    def parse(self, value: object) -> Value:
        """Convert input from a user, a file or a program to a value.

        Raises:
            ValueError: the value is invalid.
        """
        if self.optional and value == UNSET:
            return None
        if self.kind is not str and isinstance(value, str) and value not in self.also:
            value = float(value)
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        read: Value = from_json(self.annotation, value)
        return read


def _rule(annotation: Any, about: Mapping[str, Any]) -> Rule:
    """The rule of a field that `_setting` made."""
    members = [kind for kind in get_args(annotation) if kind is not NoneType]
    optional = get_origin(annotation) in (Union, UnionType)
    kind = members[0] if optional else annotation
    limit: Within | OneOf | None = None
    if get_origin(kind) is Literal:
        kind, limit = str, OneOf(get_args(kind))
    elif get_origin(kind) is Annotated:
        kind, limit = get_args(kind)
    also = tuple(text for member in members[1:] for text in get_args(member))
    return Rule(annotation=annotation, kind=kind, limit=limit, optional=optional, also=also, **about)


def _setting(meaning: str, default: Value = None, **about: bool) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, **about})


SAMPLING_DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.0, "repetition_penalty": 1.05}
)
"""Sampling where neither the settings nor the model's maker name a value."""


def _sampling(key: str, meaning: str) -> Any:
    return _setting(
        _(
            "{meaning}; auto: what the model's maker recommends, else {default:g}",
            meaning=meaning,
            default=SAMPLING_DEFAULTS[key],
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. `None` means that the program chooses."""

    model: str | None = _setting(_("model to load at start"))
    kv: KVKind | None = _setting(  # noqa: RUF009 -- makes a field
        _(
            "precision of the key-value cache; auto: {kv}, or 8 bits where that damages the model's answers",
            kv=DEFAULT_KV,
        ),
        reload=True,
    )
    context: Annotated[int, Within(1, 10_000_000)] | None = _setting(_("context length in tokens"), reload=True)
    experts_on_device: Annotated[int, Within(0, 10_000)] | None = _setting(
        _(
            "experts of each block of a mixture on the graphics card, the others stay in main memory; "
            "auto: all that fit"
        ),
        reload=True,
    )
    layers_on_device: Annotated[int, Within(0, 10_000)] | None = _setting(
        _("first blocks of a model on the graphics card, where the processor runs the others; auto: all that fit"),
        reload=True,
    )
    budget: Annotated[float, Within(0, LARGEST_BUDGET_PERCENT)] | Exact | None = _setting(  # noqa: RUF009 -- makes a field
        _(
            "slowdown that compensation may cost, in percent; 0 is off; exact: the full-precision model's answers; "
            "auto: {default:g}",
            default=DEFAULT_BUDGET_PERCENT,
        )
    )
    prompt_budget: Annotated[float, Within(0, LARGEST_BUDGET_PERCENT)] | None = _setting(
        _(
            "delay of the first token that compensating the prompt may cost, in percent; 0 is off; auto: {default:g}",
            default=DEFAULT_PROMPT_BUDGET_PERCENT,
        )
    )
    k_chunk: Annotated[int, Within(0, CHUNK)] | None = _setting(
        _("compensated channels per 1024; 0 is none; auto: what the budget allows")
    )
    speculate: Annotated[str, OneOf(("auto", "off", "on"))] = _setting(
        _(
            "draft tokens, from the text, by the model's own head, or by the model, and verify several at a time; "
            "auto: where that pays; on: always"
        ),
        "auto",
        reload=True,
    )
    gamma: Annotated[int, Within(1, LARGEST_GAMMA)] | None = _setting(
        _("tokens that the model drafts per round of speculation; auto: the fastest number"), reload=True
    )
    sensitive_layers: Annotated[int, Within(0, 1000)] = _setting(
        _("layers, the most sensitive ones, whose cache the model's drafts read at 8 bits instead of 4; 0: none"),
        0,
        reload=True,
    )
    num_parallel: Annotated[int, Within(1, 64)] | None = _setting(
        _("requests answered at the same time; auto: up to 4, as memory allows"), reload=True
    )
    max_models: Annotated[int, Within(1, 16)] = _setting(
        _("models loaded at the same time, as memory allows; from the next start"), MAX_MODELS
    )
    backend: Annotated[str, OneOf(("auto", "triton", "cpu", "reference"))] = _setting(
        _("what runs the model"), "auto", reload=True
    )
    idle_unload: Annotated[int, Within(0, 100_000)] | None = _setting(
        _(
            "minutes without a request after which the model is unloaded until needed; 0 is never; auto: {default}; "
            "from the next start",
            default=DEFAULT_IDLE_MINUTES,
        )
    )
    temperature: Annotated[float, Within(0, 2)] | None = _sampling(
        "temperature", _("sampling temperature; 0 is greedy")
    )
    top_p: Annotated[float, Within(0, 1, above=True)] | None = _sampling(
        "top_p", _("cumulative probability sampled from; 1 is all")
    )
    top_k: Annotated[int, Within(0, 10_000_000)] | None = _sampling(
        "top_k", _("number of tokens sampled from; 0 is all")
    )
    min_p: Annotated[float, Within(0, 1)] | None = _sampling(
        "min_p", _("minimum probability relative to the best token; 0 is off")
    )
    repetition_penalty: Annotated[float, Within(1, 2)] | None = _sampling(
        "repetition_penalty", _("penalty for repeated tokens; 1 is off, more breaks loops")
    )
    max_tokens: Annotated[int, Within(1, 10_000_000)] | None = _setting(
        _("maximum length of an answer in tokens; auto: what fits")
    )
    system_prompt: str = _setting(_("instructions to the model before every chat"), "")
    thinking: Annotated[str, OneOf(("auto", "on", "off"))] = _setting(
        _("whether a model that can reason does so before it answers; auto: the model's own default"), "auto"
    )
    overflow: Annotated[str, OneOf(("drop", "summarize", "ask"))] = _setting(
        _(
            "what happens when a chat exceeds the context: its oldest messages are dropped, are "
            "summarized, or you are asked each time"
        ),
        "drop",
    )
    history: Annotated[str, OneOf(("on", "off"))] = _setting(_("whether chats are saved on this machine"), "on")
    endpoint: str | None = _setting(
        _("address of an OpenAI-compatible server to use instead of this machine; auto: this machine")
    )
    endpoint_token: str = _setting(_("token for that server"), "", secret=True)
    sidebar: Annotated[str, OneOf(("on", "off"))] = _setting(
        _("whether the list of chats is shown next to the chat, if there is room"), "on"
    )
    vim: Annotated[str, OneOf(("on", "off"))] = _setting(
        _("whether h, j, k, l, g and G move in lists and messages, as in vim; the composer has no modes"), "off"
    )
    keys: str = _setting(_("other keys for actions: chat.new=f9, app.help=ctrl+x; F1 lists the actions"), "")
    theme: Annotated[str, OneOf(("dark", "light", "contrast", "terminal"))] = _setting(
        _("colours of the terminal UI"), "dark"
    )

    def __post_init__(self) -> None:
        for key, rule in RULES.items():
            object.__setattr__(self, key, _checked(key, rule, getattr(self, key), _("the program")))

    @property
    def speculation(self) -> Speculate | None:
        """The drafts of the model that override any measurement; None if there are none, see `drafts`."""
        found = Speculate(gamma=self.gamma, sensitive_layers=self.sensitive_layers)
        return found if self.speculate == "on" else None

    @property
    def drafts(self) -> Drafts:
        """The request for drafts."""
        return self.speculation or (None if self.speculate == "auto" else False)

    def cache(self, asked: KVKind | None = None) -> KVKind | None:
        """The kind of cache to load with; None: the model's own, or that of drafts where they are forced.

        Args:
            asked: the kind that this load was asked for by name, which goes before.
        """
        return asked or (None if self.speculation else self.kv)

    def compensation(self, asked: Compensation | None = None, prompt_budget: float | None = None) -> Compensation:
        """What decides how much is compensated.

        Args:
            asked: what this load was asked for instead; see `of_settings`.
            prompt_budget: the percentage for prompts that this load was asked for.
        """
        found = of_settings(self.k_chunk, self.budget, asked, prompt_budget=self.prompt_budget)
        if prompt_budget is None or found.exact:
            return found
        return dataclasses.replace(found, prompt_budget_percent=prompt_budget)

    def load_request(self, model: str) -> LoadRequest:
        """The request that loads a model with these settings."""
        from runtime.wire.requests import LoadRequest

        wanted = self.compensation()
        return LoadRequest(
            model=model,
            kv=self.cache(),
            speculate=None if self.drafts is None else bool(self.drafts),
            gamma=self.gamma,
            sensitive_layers=self.sensitive_layers,
            k_chunk=wanted.k_chunk,
            budget=wanted.budget,
            or_usual=wanted.or_usual,
            prompt_budget=wanted.prompt_budget_percent,
            context=self.context,
            num_parallel=self.num_parallel or _ANSWERS,
            backend=self.backend,
            experts_on_device=self.experts_on_device,
            layers_on_device=self.layers_on_device,
        )

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


_ANNOTATIONS = get_type_hints(Settings, include_extras=True)
RULES: Mapping[str, Rule] = {
    field.name: _rule(_ANNOTATIONS[field.name], field.metadata) for field in dataclasses.fields(Settings)
}
"""The rule of every setting, by key, in display order."""


def rule_of(key: str, where: str = "") -> Rule:
    """The rule of a key.

    Raises:
        SettingsError: there is no such setting.
    """
    if key in RULES:
        return RULES[key]
    near = hint(key, RULES, _("known: {names}", names=", ".join(RULES)))
    if where:
        raise SettingsError(_("unknown setting {key!r} in {where}: {near}", key=key, where=where, near=near))
    raise SettingsError(_("unknown setting {key!r}: {near}", key=key, near=near))


def _checked(key: str, rule: Rule, value: object, where: str) -> Value:
    try:
        return rule.parse(value)
    except (ValueError, OverflowError):
        shown = "•••" if rule.secret else repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "…"
        place = _(" (from {where})", where=where) if where else ""
        raise SettingsError(
            _(
                "{key} can't be {shown}{place}; it must be {allowed}",
                key=key,
                shown=shown,
                place=place,
                allowed=rule.allowed,
            )
        ) from None


def check(key: str, value: object, where: str = "") -> Value:
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
        raise SettingsError(_("endpoint: {problem}", problem=problem))


def _read(file: Path) -> dict[str, object]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(_("cannot read the settings file {file}: {error}", file=file, error=error)) from error
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(
            _("the settings file {file} is not valid TOML: {error}; correct or delete it", file=file, error=error)
        ) from error


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
            values[key] = check(key, text, _("the environment variable {variable}", variable=variable))
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
        raise SettingsError(_("cannot write the settings file {file}: {error}", file=file, error=error)) from error
