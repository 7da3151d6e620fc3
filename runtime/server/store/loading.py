"""Loader: loads models of a catalogue by a memory plan, and tunes them to their budgets."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from models.progress import Cancelled as CancelledCheck
from models.progress import Progress, ProgressCallback
from models.store import Store, StoredModel
from runtime.backends import AUTO, backend
from runtime.backends.decoder import Decoder, DecoderOptions, PlacesExperts
from runtime.budget.prompt_tuning import PROMPT_TOKENS
from runtime.budget.spending import spend, spend_on_prompts
from runtime.budget.tuning import PROFILES
from runtime.compensation import Compensation, check_blocks, k_chunk_by_type
from runtime.drafting import Drafts
from runtime.engine.conversations.saved_folder import SavedCaches, forget, holding
from runtime.engine.speculation.costs import start as start_speculation
from runtime.errors import Cancelled, Problem
from runtime.kv.kinds import KVKind, cache_for
from runtime.server.service.interfaces import LoadedModel
from runtime.server.service.service import Service
from runtime.server.store.catalogue import Bundle, StoreCatalogue
from runtime.server.store.inspecting import MachineInspector
from runtime.server.store.making import StoreWorkshop
from runtime.system.heap import trim
from runtime.system.power import on_battery
from runtime.wire.answers import Holding
from runtime.wire.device import PromptTuning
from runtime.wire.requests import LoadRequest, TuneRequest
from tuner.placement import ExpertPlacement
from tuner.profiles import ProfileStore

if TYPE_CHECKING:
    from runtime.engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDefaults:
    """Defaults of a load request."""

    compensation: Compensation = field(default_factory=Compensation)
    """If neither a k_chunk nor a budget is requested."""
    speculation: Drafts = None
    """None: as measured to be best; False: no drafts."""
    kv: KVKind | None = None
    """Kind of KV cache; None: `runtime.kv.kinds.cache_for` chooses."""
    context: int | None = None
    """Tokens; None: as many as fit, up to a default."""
    backend: str = AUTO
    """Which backend."""
    experts_on_device: int | None = None
    """Experts of each block on a GPU; None: as many as fit."""
    num_parallel: int | None = None
    """Most requests answered at the same time; None: `PARALLEL`."""


class StoreLoader:
    """Loads models of a catalogue, and tunes them.

    Args:
        catalogue: The catalogue.
        profiles: Folder of tuning profiles and of the memory's measured bandwidth.
        defaults: Defaults of requests.
        chats: Folder for saving the caches of long conversations; None: they are not saved.
        evaluation: File with the text on which budgets are refined; None: they are not.
    """

    def __init__(
        self,
        catalogue: StoreCatalogue,
        profiles: Path,
        defaults: LoadDefaults | None = None,
        *,
        chats: Path | None = None,
        evaluation: Path | None = None,
    ) -> None:
        self._evaluation = evaluation
        self._catalogue = catalogue
        self._profiles = profiles
        self._defaults = defaults or LoadDefaults()
        self._chats = chats

    def load(self, request: LoadRequest, progress: ProgressCallback, cancelled: CancelledCheck) -> LoadedModel:
        """Load a model, and tune it to its budget. Context and experts on the device are limited to the model's own.

        Raises:
            Cancelled: `cancelled` said so.
            ModelError: the model is missing or damaged.
            RuntimeFailure: not enough memory, or the backend cannot run it.
        """
        from runtime.load.memory import CONVERSATIONS, PARALLEL, cache_facts, describe, experts_within
        from runtime.load.plan import plan_load

        def report(phase: str, message: str) -> None:
            if cancelled():
                raise Cancelled("the load was stopped")
            progress(Progress(phase=phase, done=0, total=None, unit="", message=message))

        report("open", f"opening {request.model}")
        model = self._catalogue.open(request.model)
        defaults = self._defaults
        compensation = request.compensation or defaults.compensation
        check_blocks(compensation.by_type, model.spec.num_layers)
        asked = request.speculation or (defaults.speculation if request.speculate is None else False)
        parallel = request.num_parallel or defaults.num_parallel or PARALLEL
        context = request.context or defaults.context
        experts = defaults.experts_on_device if request.experts_on_device is None else request.experts_on_device
        plan = plan_load(
            model,
            compensation,
            kv=cache_for(request.kv or (None if request.speculation else defaults.kv), drafts=bool(asked)),
            context=None if context is None else min(context, model.spec.max_context),
            backend_name=defaults.backend if request.backend == AUTO else request.backend,
            slots=max(CONVERSATIONS, parallel),
            parallel=parallel,
            experts_on_device=experts_within(experts, model.spec),
            measurements=self._profiles,
        )
        plan.prepare(progress)
        report("load", f"loading {request.model}: {describe(plan.memory)}")
        engine = plan.open_engine(progress)
        engine.parallel = min(parallel, plan.options.slots)
        if cancelled():
            engine.close()
            raise Cancelled("the load was stopped")
        loaded = LoadedModel(
            name=request.model,
            engine=engine,
            backend=engine.decoder.backend,
            reason=engine.reason,
            bits=model.recipe.bits,
            kv=plan.options.kv,
            k_chunk=compensation.by_type,
            context=plan.options.context,
            weight_bytes=engine.decoder.weight_bytes,
            kv_bytes=engine.decoder.kv_bytes,
            sampling=model.sampling,
            slots=engine.parallel,
            drafts=asked,
            problems=_lacking(engine.decoder),
            caches=cache_facts(model.spec, plan.memory, plan.options.max_rows),
            experts=partial(_experts, engine.decoder),
        )
        try:
            loaded = self._spend(loaded, model, compensation, progress, cancelled, prompts_later=True)
            self._remember(engine, model)
        except BaseException:
            engine.close()
            raise
        trim()
        return loaded

    def _remember(self, engine: Engine, model: StoredModel) -> None:
        """Let an engine save long conversations, if there is a folder for them."""
        from runtime.budget.profile_key import content_id
        from runtime.engine.conversations.saved import About

        cache = engine.decoder.cache
        if self._chats is not None:
            about = About.of(
                cache,
                model.spec,
                model=content_id(model),
                recipe=model.recipe.to_json(),
                prompts=engine.decoder.options.prompt_k_chunk,
            )
            engine.save_to(SavedCaches(self._chats, about, model=model.path))

    def forget(self, chat: str | None) -> Holding:
        """Delete the saved caches of a conversation, or of all.

        Raises:
            SavedCacheError: the system refused.
        """
        return Holding() if self._chats is None else forget(self._chats, chat=chat)

    def held(self) -> Holding:
        """Saved caches on disk."""
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
        wanted, engine = request.compensation, _engine(loaded)
        decoder, model = engine.decoder, self._catalogue.open(loaded.name)
        before = decoder.options
        try:
            if wanted.budget_percent is None:
                check_blocks(wanted.by_type, model.spec.num_layers)
                decoder.set_k_chunk(wanted.by_type)
                loaded = replace(loaded, k_chunk=wanted.by_type, tuning=None, problems=_lacking(decoder))
            loaded = self._spend(loaded, model, wanted, progress, cancelled, force=request.force)
        except BaseException:
            decoder.set_k_chunk(before.k_chunk, before.n_tb)
            decoder.set_prompt_k_chunk(before.prompt_k_chunk)
            raise
        self._forget_other_prompts(engine, model, before)
        return loaded

    def _forget_other_prompts(self, engine: Engine, model: StoredModel, before: DecoderOptions) -> None:
        """Drop conversations whose prompts were compensated in another way than prompts are now."""
        if engine.decoder.options.prompt_k_chunk != before.prompt_k_chunk:
            engine.forget()
            self._remember(engine, model)

    def refine(self, loaded: LoadedModel, cancelled: CancelledCheck) -> LoadedModel:
        """Tune the prompts of a loaded model if that was put off, else refine its budget; see `Loader.refine`."""
        try:
            if loaded.prompts is not None and loaded.prompts.pending:
                return self._prompts_tuned(loaded, loaded.prompts, cancelled)
            return self._refined(loaded, cancelled)
        except Cancelled:
            return loaded

    def _prompts_tuned(self, loaded: LoadedModel, pending: PromptTuning, cancelled: CancelledCheck) -> LoadedModel:
        """The model with its prompts tuned, if there is room. Its conversations are dropped."""
        engine = _engine(loaded)
        if not engine.has_spare(PROMPT_TOKENS):
            return loaded
        logger.info("tuning the prompts of %s", loaded.name)
        model, before = self._catalogue.open(loaded.name), engine.decoder.options
        prompts, problem = spend_on_prompts(
            engine.borrow,
            model,
            pending,
            profiles=ProfileStore(self._profiles),
            cancelled=cancelled,
        )
        self._forget_other_prompts(engine, model, before)
        problems = loaded.problems if problem is None else (*loaded.problems, problem)
        return replace(loaded, prompts=prompts, problems=problems)

    def _refined(self, loaded: LoadedModel, cancelled: CancelledCheck) -> LoadedModel:
        """The model with its budget refined.

        Conversations stay cached: the compensation of prompts does not change. A model that drafts for itself, or that
        decodes in another way than its budget was tuned for, gets the result when it is loaded next.
        """
        from runtime.budget.refining import refine
        from runtime.budget.text import WINDOW

        tuning, text, engine = loaded.tuning, self._text(), _engine(loaded)
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

    def _spend(
        self,
        loaded: LoadedModel,
        model: StoredModel,
        compensation: Compensation,
        progress: ProgressCallback,
        cancelled: CancelledCheck,
        *,
        force: bool = False,
        prompts_later: bool = False,
    ) -> LoadedModel:
        """Apply the budgets to a loaded model, and let it speculate as requested or where that pays."""
        engine = _engine(loaded)
        spent = spend(
            engine.borrow,
            model,
            compensation,
            drafts=loaded.drafts,
            profiles=ProfileStore(self._profiles),
            text=self._text(),
            force=force,
            prompts_later=prompts_later,
            progress=progress,
            cancelled=cancelled,
        )

        def text() -> list[int]:
            return engine.tokenizer.encode(self._text() or "")

        start_speculation(engine, spent.speculation, text=text, cancelled=cancelled)
        return replace(
            loaded,
            k_chunk=k_chunk_by_type(engine.decoder.options.k_chunk),
            tuning=spent.tuning,
            prompts=spent.prompts,
            speculation=spent.speculation,
            problems=(*spent.problems, *_lacking(engine.decoder)),
        )


def _engine(loaded: LoadedModel) -> Engine:
    """The engine of a model that this loader loaded."""
    from runtime.engine.engine import Engine

    assert isinstance(loaded.engine, Engine)
    return loaded.engine


def _experts(decoder: Decoder) -> ExpertPlacement | None:
    """Where a decoder's experts are."""
    return decoder.experts if isinstance(decoder, PlacesExperts) else None


def _lacking(decoder: Decoder) -> tuple[Problem, ...]:
    """Problems of a loaded model."""
    return backend(decoder.backend).problems(decoder)


def open_service(
    home: Path,
    bundle: Bundle,
    *,
    defaults: LoadDefaults | None = None,
    idle_unload_s: float | None = None,
    chats: Path | None = None,
) -> Service:
    """Create the service of the models under a home folder.

    Args:
        home: The program's folder; the store is `<home>/models`, tuning profiles are in `<home>/profiles`.
        bundle: Files bundled with the program.
        defaults: Defaults of load requests.
        idle_unload_s: Seconds without a request after which a model is unloaded; None: never.
        chats: Folder for saving the caches of long conversations while their model is not loaded; None: nothing of a
            conversation is written to disk.
    """
    store = Store(home / "models")
    catalogue = StoreCatalogue(store, bundle.models, chats)
    return Service(
        StoreLoader(catalogue, home / PROFILES, defaults, chats=chats, evaluation=bundle.evaluation),
        catalogue,
        StoreWorkshop(store, bundle, chats),
        inspector=MachineInspector(home / PROFILES),
        idle_unload_s=idle_unload_s,
    )
