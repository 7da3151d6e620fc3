"""Loading of stored models: the one way in which commands, the terminal UI and the server get a model that answers.

`load` carries out a plan: the backend is prepared, the model is opened, its budgets are applied, and it speculates as
requested or where that pays. `Loader` does this for the requests of a server, and tunes what it loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from models.progress import Cancelled as CancelledCheck
from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.store import StoredModel
from models.store.certificate import Certificate
from runtime.backends import AUTO, ON_CARD, backend
from runtime.backends.decoder import Decoder, DecoderOptions, PlacesExperts
from runtime.compensation import Compensation, check_blocks, k_chunk_by_type
from runtime.drafting import Drafts
from runtime.engine.costs import start as start_speculation
from runtime.engine.engine import Engine
from runtime.engine.saved import About, SavedCaches, forget, holding
from runtime.errors import Cancelled, OutOfMemoryError, Problem
from runtime.load.catalogue import Catalogue
from runtime.load.memory import PARALLEL, cache_facts, describe, experts_within, layers_within
from runtime.load.plan import LoadOptions, LoadPlan, plan_load, source_of
from runtime.system.heap import trim
from runtime.system.power import on_battery
from runtime.wire.answers import CacheFacts, Holding
from runtime.wire.device import PromptTuning, Tuning
from runtime.wire.requests import LoadRequest, TuneRequest
from tuner.placement import BlockPlacement, ExpertPlacement
from tuner.profiles import ProfileStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The first item of a generation: the model is loaded and the prompt fits."""

    model: str
    backend: str
    prompt_tokens: int
    """Tokens of the prompt."""
    opening: str = ""
    """The answer's beginning that the prompt already has: the tag of the model's reasoning."""
    k_chunk: Mapping[str, int] = field(default_factory=dict)
    """Compensated channels per 1024, by layer type."""
    slowdown_percent: float | None = None
    """Measured slowdown of decoding by that."""
    prompt_slowdown_percent: float | None = None
    """Slowdown of prompts by their compensation, if they are compensated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    name: str
    engine: Engine
    backend: str
    reason: str
    """The reason for this backend."""
    bits: float
    """Bits of the base weights."""
    kv: str
    """Precision of the KV cache."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    context: int
    """Tokens of context."""
    weight_bytes: int
    """Bytes of weights read per token."""
    kv_bytes: int
    """Bytes of the KV cache."""
    exact: bool = False
    """Whether the source's own weights answer."""
    held_bytes: int = 0
    """Bytes of weights and cache, wherever they are."""
    card_bytes: int = 0
    """Those of them that are on a graphics card."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings recommended by its maker (`models.generation_config`)."""
    slots: int = 1
    """Most requests answered at the same time."""
    tuning: Tuning | None = None
    """Tuning result; None with a fixed k_chunk or without tuning."""
    prompts: PromptTuning | None = None
    """Prompt tuning result; None without a prompt budget."""
    drafts: Drafts = None
    speculation: Drafts = None
    drafts_by_head: bool = False
    """Whether its block that predicts further tokens drafts."""
    problems: Sequence[Problem] = ()
    """Problems: why a budget has no effect, or what could not be page-locked."""
    caches: Mapping[str, CacheFacts] = field(default_factory=dict)
    """Sizes of every kind of cache for it."""
    certificate: Certificate = field(default_factory=Certificate)
    """What was measured when it was prepared."""
    experts: Callable[[], ExpertPlacement | None] = lambda: None
    """Where its experts are now; see `DeviceReport.experts`."""
    blocks: BlockPlacement | None = None
    """See `DeviceReport.blocks`."""
    plan: LoadPlan | None = None
    """What was carried out; None where the model's files are not kept open."""

    @property
    def busy(self) -> bool:
        """Whether it answers a request, or has one waiting."""
        return bool(self.engine.running or self.engine.waiting)

    def accepted(self, prompt: Sequence[int], opening: str = "") -> Accepted:
        """What is known of an answer before its first token."""
        prompts = self.prompts
        return Accepted(
            model=self.name,
            backend=self.backend,
            prompt_tokens=len(prompt),
            opening=opening,
            k_chunk=self.k_chunk,
            slowdown_percent=self.tuning.measured_slowdown_percent if self.tuning else None,
            prompt_slowdown_percent=prompts.measured_slowdown_percent if prompts and prompts.k_chunk else None,
        )


def load(
    plan: LoadPlan,
    *,
    profiles: ProfileStore,
    text: Callable[[], str | None],
    prompts_later: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: CancelledCheck = never_cancelled,
) -> LoadedModel:
    """Load a planned model: prepare its backend, open it, apply its budgets, and let it speculate.

    Args:
        plan: From `plan_load`.
        profiles: Folder of tuning profiles.
        text: Gives the text on which budgets are refined and sensitive layers are found; None: there is none.
        prompts_later: Whether prompts that were never tuned wait for `tune_prompts`: a first answer need not.
        progress: Receives progress reports.
        cancelled: Polled with every report, and between measurements.

    Raises:
        Cancelled: `cancelled` said so; completed measurements are stored.
        ModelError: the model is damaged.
        RuntimeFailure: the backend cannot run it, or not enough memory.
    """

    def check() -> None:
        if cancelled():
            raise Cancelled("the load was stopped")

    def report(step: Progress) -> None:
        check()
        progress(step)

    model, asked, memory = plan.model, plan.asked, plan.memory
    check()
    plan.prepare(report)
    engine = plan.open_engine(report)
    try:
        check()
        loaded = LoadedModel(
            name=model.name,
            engine=engine,
            backend=engine.decoder.backend,
            reason=engine.reason,
            bits=model.recipe.bits,
            kv=plan.options.kv,
            k_chunk=asked.compensation.by_type,
            context=plan.options.context,
            weight_bytes=engine.decoder.weight_bytes,
            kv_bytes=engine.decoder.kv_bytes,
            exact=plan.options.exact is not None,
            held_bytes=memory.held_bytes,
            card_bytes=memory.weight_bytes + memory.kv_bytes if engine.decoder.backend in ON_CARD else 0,
            sampling=model.sampling,
            slots=engine.parallel,
            drafts=asked.speculation,
            certificate=Certificate.of(model.path),
            experts=partial(_experts, engine.decoder),
            blocks=memory.blocks_of(model.spec) if engine.decoder.options.layers_on_device else None,
            plan=plan,
        )
        loaded = apply_budgets(
            loaded,
            model,
            asked.compensation,
            profiles=profiles,
            text=text,
            prompts_later=prompts_later,
            progress=progress,
            cancelled=cancelled,
        )
        return loaded if plan.inexact is None else replace(loaded, problems=(plan.inexact, *loaded.problems))
    except BaseException:
        engine.close()
        raise


def apply_budgets(
    loaded: LoadedModel,
    model: StoredModel,
    compensation: Compensation,
    *,
    profiles: ProfileStore,
    text: Callable[[], str | None],
    force: bool = False,
    prompts_later: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: CancelledCheck = never_cancelled,
) -> LoadedModel:
    """Apply budgets to a loaded model, and let it speculate as requested or where that pays; arguments as of `load`."""
    from runtime.budget.spending import spend

    engine = loaded.engine
    spent = spend(
        engine.borrow,
        model,
        compensation,
        drafts=loaded.drafts,
        profiles=profiles,
        force=force,
        prompts_later=prompts_later,
        progress=progress,
        cancelled=cancelled,
    )
    start_speculation(
        engine, spent.speculation, text=lambda: engine.tokenizer.encode(text() or ""), cancelled=cancelled
    )
    return replace(
        loaded,
        k_chunk=k_chunk_by_type(engine.decoder.options.k_chunk),
        tuning=spent.tuning,
        prompts=spent.prompts,
        speculation=spent.speculation,
        drafts_by_head=engine.drafts_by_head,
        problems=(*spent.problems, *_load_problems(loaded, engine.decoder)),
    )


def tune_prompts(
    loaded: LoadedModel,
    model: StoredModel,
    *,
    profiles: ProfileStore,
    progress: ProgressCallback = ignore_progress,
    cancelled: CancelledCheck = never_cancelled,
) -> LoadedModel:
    """Tune the prompts of a model that was loaded with `prompts_later`; unchanged if there is nothing left to tune.

    Raises:
        Cancelled: `cancelled` said so; completed measurements are stored.
        BackendError: the device does not respond.
    """
    from runtime.budget.spending import spend_on_prompts

    if loaded.prompts is None or not loaded.prompts.pending:
        return loaded
    prompts, problem = spend_on_prompts(
        loaded.engine.borrow, model, loaded.prompts, profiles=profiles, progress=progress, cancelled=cancelled
    )
    problems = loaded.problems if problem is None else (*loaded.problems, problem)
    return replace(loaded, prompts=prompts, problems=problems)


def _experts(decoder: Decoder) -> ExpertPlacement | None:
    """Where a decoder's experts are; None if it cannot have them in two places."""
    return decoder.experts if isinstance(decoder, PlacesExperts) else None


def _load_problems(loaded: LoadedModel, decoder: Decoder) -> tuple[Problem, ...]:
    """Problems of the backend, and of a cache that was asked for although it damages answers."""
    found, certificate, kv = backend(decoder.backend).problems(decoder), loaded.certificate, decoder.options.kv
    if not certificate.harms(kv):
        return found
    what = f"the {kv} cache, which was asked for, damages answers of {loaded.name}: {certificate.cache_words}"
    return (*found, Problem(what=what, fix="set kv to auto, or leave out --kv"))


class Loader:
    """Loads and tunes the models that requests name; called in the engine's thread.

    Args:
        catalogue: The models.
        profiles: Folder of tuning profiles and of the memory's measured bandwidth.
        defaults: Where a request says nothing.
        chats: Folder for saving the caches of long conversations; None: they are not saved.
        evaluation: File with the text on which budgets are refined; None: they are not.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        profiles: Path,
        defaults: LoadOptions | None = None,
        *,
        chats: Path | None = None,
        evaluation: Path | None = None,
    ) -> None:
        self._evaluation = evaluation
        self._catalogue = catalogue
        self._profiles = profiles
        self._defaults = defaults or LoadOptions()
        self._chats = chats

    def load(
        self, request: LoadRequest, progress: ProgressCallback, cancelled: CancelledCheck, *, beside: bool = False
    ) -> LoadedModel:
        """Load a model, and tune it to its budget. Context and experts on the device are limited to the model's own.

        With `beside`, another model may be in the way: what is less than the usual then counts as too little memory.

        Raises:
            Cancelled: `cancelled` said so.
            ModelError: the model is missing or damaged.
            RuntimeFailure: not enough memory, or the backend cannot run it.
        """
        if cancelled():
            raise Cancelled("the load was stopped")
        progress(Progress(phase="open", done=0, total=None, unit="", message=f"opening {request.model}"))
        model = self._catalogue.open(request.model)
        asked = self._options(request, model)
        plan = plan_load(model, asked, measurements=self._profiles, store=self._catalogue.store)
        if beside and plan.is_cut:
            raise OutOfMemoryError(f"{request.model} would get less than its usual memory: {describe(plan.memory)}")
        message = f"loading {request.model}: {describe(plan.memory)}"
        progress(Progress(phase="load", done=0, total=None, unit="", message=message))
        loaded = load(
            plan,
            profiles=ProfileStore(self._profiles),
            text=self._text,
            prompts_later=True,
            progress=progress,
            cancelled=cancelled,
        )
        self._save_chats(loaded.engine, model)
        trim()
        caches = cache_facts(model.spec, plan.memory, plan.options.max_rows)
        return replace(loaded, name=request.model, caches=caches, plan=None)

    def _options(self, request: LoadRequest, model: StoredModel) -> LoadOptions:
        """The defaults, overridden by a request."""
        usual = self._defaults
        context = request.context or usual.context
        experts = usual.experts_on_device if request.experts_on_device is None else request.experts_on_device
        layers = usual.layers_on_device if request.layers_on_device is None else request.layers_on_device
        return LoadOptions(
            compensation=request.compensation or usual.compensation,
            speculation=request.speculation or (usual.speculation if request.speculate is None else False),
            kv=request.kv or (None if request.speculation else usual.kv),
            context=None if context is None else min(context, model.spec.max_context),
            backend=usual.backend if request.backend == AUTO else request.backend,
            experts_on_device=experts_within(experts, model.spec),
            layers_on_device=layers_within(layers, model.spec),
            num_parallel=request.num_parallel or usual.num_parallel or PARALLEL,
        )

    def _save_chats(self, engine: Engine, model: StoredModel) -> None:
        """Let an engine save long conversations, if there is a folder for them."""
        from runtime.budget.profile_key import content_id

        if self._chats is not None:
            about = About.of(
                engine.decoder.cache,
                model.spec,
                model=content_id(model),
                recipe=model.recipe.to_json() | ({"exact": True} if engine.decoder.options.exact else {}),
                prompts=engine.decoder.options.prompt_k_chunk,
            )
            engine.save_to(SavedCaches(self._chats, about, model=model.path))

    def check_source(self, name: str) -> None:
        """Check that a model can answer exactly, as far as that is known without loading it.

        Raises:
            ModelError, RuntimeFailure: it can't.
        """
        source_of(self._catalogue.open(name), self._catalogue.store)

    def forget(self, chat: str | None) -> Holding:
        """Delete the saved caches of a conversation, or of all. Returns the deleted files.

        Raises:
            SavedCacheError: the system refused.
        """
        return Holding() if self._chats is None else forget(self._chats, chat=chat)

    def held(self) -> Holding:
        return Holding() if self._chats is None else holding(self._chats)

    def tune(
        self, loaded: LoadedModel, request: TuneRequest, progress: ProgressCallback, cancelled: CancelledCheck
    ) -> LoadedModel:
        """Change the compensation of a loaded model. Its conversations stay cached, as they were computed.

        If the compensation of prompts changes, conversations are dropped: otherwise entries computed with other weights
        would stay in them forever.

        Raises:
            Cancelled: `cancelled` said so; the model stays as it was.
            RequestError: the model has no residuals, and a k_chunk asks for compensation.
            ModelError: the model's files are gone.
        """
        wanted, engine = request.compensation, loaded.engine
        decoder, model = engine.decoder, self._catalogue.open(loaded.name)
        before = decoder.options
        try:
            if wanted.budget_percent is None:
                check_blocks(wanted.by_type, model.spec.num_layers)
                decoder.set_k_chunk(wanted.by_type)
            tuned = apply_budgets(
                loaded,
                model,
                wanted,
                profiles=ProfileStore(self._profiles),
                text=self._text,
                force=request.force,
                progress=progress,
                cancelled=cancelled,
            )
        except BaseException:
            decoder.set_k_chunk(before.k_chunk, before.n_tb)
            decoder.set_prompt_k_chunk(before.prompt_k_chunk)
            raise
        self._forget_other_prompts(engine, model, before)
        return tuned

    def _forget_other_prompts(self, engine: Engine, model: StoredModel, before: DecoderOptions) -> None:
        """Drop conversations whose prompts were compensated in another way than prompts are now."""
        if engine.decoder.options.prompt_k_chunk != before.prompt_k_chunk:
            engine.forget()
            self._save_chats(engine, model)

    def refine(self, loaded: LoadedModel, cancelled: CancelledCheck) -> LoadedModel:
        """Take one step to a better tuning of a loaded model: its prompts, if they were put off, then its budget.

        Called while nothing else runs, until it returns what it got. `cancelled` is polled every few steps; then
        everything stays as it was, and the next call continues.
        """
        try:
            if loaded.prompts is not None and loaded.prompts.pending:
                return self._prompts_tuned(loaded, cancelled)
            return self._refined(loaded, cancelled)
        except Cancelled:
            return loaded

    def _prompts_tuned(self, loaded: LoadedModel, cancelled: CancelledCheck) -> LoadedModel:
        """The model with its prompts tuned, if there is room. Its conversations are dropped."""
        from runtime.budget.prompt_tuning import PROMPT_TOKENS

        engine = loaded.engine
        if not engine.has_spare(PROMPT_TOKENS):
            return loaded
        logger.info("tuning the prompts of %s", loaded.name)
        model, before = self._catalogue.open(loaded.name), engine.decoder.options
        tuned = tune_prompts(loaded, model, profiles=ProfileStore(self._profiles), cancelled=cancelled)
        self._forget_other_prompts(engine, model, before)
        return tuned

    def _refined(self, loaded: LoadedModel, cancelled: CancelledCheck) -> LoadedModel:
        """The model with its budget refined.

        Conversations stay cached: the compensation of prompts does not change. A model that drafts for itself, or that
        decodes in another way than its budget was tuned for, gets the result when it is loaded next.
        """
        from runtime.budget.text import WINDOW
        from runtime.budget.tuning import refine

        tuning, text, engine = loaded.tuning, self._text(), loaded.engine
        if tuning is None or not tuning.budget_percent or tuning.refined or text is None:
            return loaded
        if on_battery() or not engine.has_spare(WINDOW):
            return loaded
        model, before = self._catalogue.open(loaded.name), engine.decoder.options
        with engine.borrow(WINDOW) as decoder:
            logger.info("refining the slowdown budget of %s", loaded.name)
            found = refine(
                decoder,
                model,
                tuning,
                profiles=ProfileStore(self._profiles),
                text=text,
                encode=engine.tokenizer.encode,
                cancelled=cancelled,
            )
            logger.info("the slowdown budget of %s is refined", loaded.name)
            if k_chunk_by_type(before.k_chunk) != k_chunk_by_type(tuning.k_chunk) or engine.speculates:
                decoder.set_k_chunk(before.k_chunk, before.n_tb)
                return replace(loaded, tuning=replace(tuning, refined=True))
        return replace(loaded, tuning=found, k_chunk=k_chunk_by_type(found.k_chunk))

    def _text(self) -> str | None:
        """The text on which budgets are refined."""
        try:
            return None if self._evaluation is None else self._evaluation.read_text(encoding="utf-8")
        except OSError as error:
            logger.warning("cannot read %s: %s", self._evaluation, error.strerror)
            return None
