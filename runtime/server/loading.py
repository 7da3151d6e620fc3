"""The real loader: models of a catalogue, planned against free memory, tuned to their budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from models.progress import Cancelled as CancelledCheck
from models.progress import Progress, ProgressCallback
from models.store import Store, StoredModel
from runtime.backends import backend
from runtime.compensation import Compensation, k_chunk_by_type
from runtime.decoder import Decoder
from runtime.drafting import Drafts, Speculate, cache_for
from runtime.errors import Cancelled
from runtime.kv.saved_folder import SavedCaches, forget, holding
from runtime.offering import take
from runtime.problem import Problem
from runtime.prompt_tuning import PROMPT_TOKENS, is_known, prompts_within_budget
from runtime.server.catalogue import Bundle, StoreCatalogue
from runtime.server.inspecting import MachineInspector
from runtime.server.interfaces import LoadedModel
from runtime.server.making import StoreWorkshop
from runtime.server.service import Service
from runtime.speculation.costs import start as start_speculation
from runtime.tuning import PROFILES, within_budget
from runtime.wire.answers import Holding
from runtime.wire.requests import LoadRequest, TuneRequest
from tuner.profiles import ProfileStore

if TYPE_CHECKING:
    from runtime.engine import Engine


class StoreLoader:
    """Loads models of a catalogue with `runtime.open`, and tunes them.

    Args:
        catalogue: Where the models are.
        profiles: Folder of tuning profiles.
        compensation: What applies to a model that is loaded with neither a k_chunk nor a budget.
        chats: Folder in which long conversations outlive the loaded model; None: they do not.
        speculation: What applies to a model that is loaded without a word about it; None: what was measured to be best,
            False: nothing is drafted.
        parallel: Requests answered at the same time where a load says nothing of it; None: `PARALLEL`.
    """

    def __init__(
        self,
        catalogue: StoreCatalogue,
        profiles: Path,
        compensation: Compensation | None = None,
        *,
        chats: Path | None = None,
        speculation: Drafts = None,
        parallel: int | None = None,
    ) -> None:
        self._speculation, self._parallel = speculation, parallel
        self._catalogue = catalogue
        self._profiles = profiles
        self._chats = chats
        self._compensation = compensation or Compensation()

    def load(self, request: LoadRequest, progress: ProgressCallback, cancelled: CancelledCheck) -> LoadedModel:
        """Load a model, and tune it to its budget. A context longer than the model's own is cut to it.

        Raises:
            Cancelled: `cancelled` said so.
            ModelError: the model is missing or damaged.
            RuntimeFailure: memory does not suffice, or the backend cannot run it.
        """
        from runtime.loading import plan_load
        from runtime.memory import CONVERSATIONS, PARALLEL, cache_facts, describe

        def report(phase: str, message: str) -> None:
            if cancelled():
                raise Cancelled("the load was stopped")
            progress(Progress(phase=phase, done=0, total=None, unit="", message=message))

        report("open", f"opening {request.model}")
        model = self._catalogue.open(request.model)
        compensation = request.compensation or self._compensation
        asked = request.speculation or (self._speculation if request.speculate is None else False)
        speculation = asked or None
        parallel = request.num_parallel or self._parallel or PARALLEL
        plan = plan_load(
            model,
            compensation,
            kv=cache_for(request.kv, speculation),
            context=None if request.context is None else min(request.context, model.spec.max_context),
            asked=request.backend,
            slots=max(CONVERSATIONS, parallel),
            parallel=parallel,
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
            slots=engine.parallel,
            drafts=asked,
            problems=_lacking(engine.decoder),
            caches=cache_facts(model.spec, plan.memory, plan.options.max_rows),
        )
        try:
            if compensation.budget_percent is not None:
                loaded = self._tuned(loaded, model, compensation.budget_percent, progress, cancelled)
            loaded = self._in_best_way(loaded, model, asked)
            loaded = self._with_prompts(loaded, model, compensation, progress, cancelled)
            start_speculation(engine, loaded.speculation, cancelled=cancelled)
            self._remember(engine, model)
        except BaseException:
            engine.close()
            raise
        return loaded

    def _remember(self, engine: Engine, model: StoredModel) -> None:
        """Let an engine's long conversations outlive it, where there is a folder for them."""
        from runtime.kv.saved import About
        from runtime.profile_key import content_id

        cache = engine.decoder.cache
        if self._chats is not None and cache is not None and cache.layout is not None:
            about = About.of(
                cache,
                model.spec,
                model=content_id(model),
                recipe=model.recipe.to_json(),
                prompts=engine.decoder.options.prompt_k_chunk,
            )
            engine.keep_in(SavedCaches(self._chats, about, model=model.path))

    def forget(self, chat: str | None) -> Holding:
        """Delete the saved caches of a conversation, or all of them.

        Raises:
            SavedCacheError: the system refuses.
        """
        return Holding() if self._chats is None else forget(self._chats, chat=chat)

    def held(self) -> Holding:
        """What the saved caches take on disk."""
        return Holding() if self._chats is None else holding(self._chats)

    def tune(
        self, loaded: LoadedModel, request: TuneRequest, progress: ProgressCallback, cancelled: CancelledCheck
    ) -> LoadedModel:
        """Change the compensation of a loaded model. Its conversations stay in the cache, as they were computed.

        Where prompts are compensated in another way than before, conversations are dropped: what was read with other
        weights would stay in them for ever.

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
                decoder.set_k_chunk(wanted.by_type)
                loaded = replace(loaded, k_chunk=wanted.by_type, tuning=None, problems=_lacking(decoder))
            else:
                loaded = self._tuned(loaded, model, wanted.budget_percent, progress, cancelled, force=request.force)
            loaded = self._in_best_way(loaded, model, loaded.drafts)
            loaded = self._with_prompts(loaded, model, wanted, progress, cancelled, force=request.force)
            start_speculation(engine, loaded.speculation, cancelled=cancelled)
        except BaseException:
            decoder.set_k_chunk(before.k_chunk, before.n_tb)
            decoder.set_prompt_k_chunk(before.prompt_k_chunk)
            raise
        if decoder.options.prompt_k_chunk != before.prompt_k_chunk:
            engine.forget()
            self._remember(engine, model)
        return loaded

    def _tuned(
        self,
        loaded: LoadedModel,
        model: StoredModel,
        budget_percent: float,
        progress: ProgressCallback,
        cancelled: CancelledCheck,
        *,
        force: bool = False,
    ) -> LoadedModel:
        with _engine(loaded).lent() as decoder:
            found, problem = within_budget(
                decoder,
                model,
                budget_percent=budget_percent,
                profiles=ProfileStore(self._profiles),
                force=force,
                progress=progress,
                cancelled=cancelled,
            )
            return replace(
                loaded,
                k_chunk=k_chunk_by_type(decoder.options.k_chunk),
                tuning=found,
                problems=(*(() if problem is None else (problem,)), *_lacking(decoder)),
            )

    def _in_best_way(self, loaded: LoadedModel, model: StoredModel, asked: Drafts) -> LoadedModel:
        """Decode in the best way that was measured for the budget, unless drafts were asked for in any case.

        Args:
            loaded: The model, tuned.
            model: The stored model.
            asked: How tokens are to be drafted.
        """
        if isinstance(asked, Speculate):
            return replace(loaded, speculation=asked)
        if loaded.tuning is None or not loaded.tuning.budget_percent:
            return replace(loaded, speculation=None)
        with _engine(loaded).lent() as decoder:
            tuning, drafts = take(
                decoder, model, loaded.tuning, profiles=ProfileStore(self._profiles), drafts=asked is not False
            )
        return replace(loaded, k_chunk=tuning.k_chunk, tuning=tuning, speculation=Speculate() if drafts else None)

    def _with_prompts(
        self,
        loaded: LoadedModel,
        model: StoredModel,
        compensation: Compensation,
        progress: ProgressCallback,
        cancelled: CancelledCheck,
        *,
        force: bool = False,
    ) -> LoadedModel:
        """Compensate prompts as far as their budget pays for. What decoding's budget was told is not told again."""
        engine, percent, profiles = _engine(loaded), compensation.prompt_percent, ProfileStore(self._profiles)
        known = not force and is_known(engine.decoder, model, budget_percent=percent, profiles=profiles)
        with engine.lent(0 if known else PROMPT_TOKENS) as decoder:
            found, problem = prompts_within_budget(
                decoder,
                model,
                budget_percent=percent,
                profiles=profiles,
                force=force,
                progress=progress,
                cancelled=cancelled,
            )
        new = () if problem is None or not problem.failure else (problem,)
        return replace(loaded, prompts=found, problems=(*loaded.problems, *new))


def _engine(loaded: LoadedModel) -> Engine:
    """The engine of a model that this loader loaded."""
    from runtime.engine import Engine

    assert isinstance(loaded.engine, Engine)
    return loaded.engine


def _lacking(decoder: Decoder) -> tuple[Problem, ...]:
    """What a loaded model goes without."""
    return backend(decoder.backend).problems(decoder)


def open_service(
    home: Path,
    bundle: Bundle,
    *,
    compensation: Compensation | None = None,
    idle_unload_s: float | None = None,
    chats: Path | None = None,
    speculation: Drafts = None,
    parallel: int | None = None,
) -> Service:
    """The service of the models under a home folder.

    Args:
        home: The program's folder; the store is `<home>/models`, tuning profiles are in `<home>/profiles`.
        bundle: What came with the program.
        compensation: What applies to models that are loaded with neither a k_chunk nor a budget.
        idle_unload_s: Unload a model after so many seconds without a request; None: never.
        chats: Folder in which the caches of long conversations are kept while their model is not loaded; None: nothing
            of a conversation is written to disk.
        speculation: What applies to models that are loaded without a word about it; None: what was measured to be best,
            False: nothing is drafted.
        parallel: Requests answered at the same time, likewise; None: a few.
    """
    store = Store(home / "models")
    catalogue = StoreCatalogue(store, bundle.models, chats)
    return Service(
        StoreLoader(catalogue, home / PROFILES, compensation, chats=chats, speculation=speculation, parallel=parallel),
        catalogue,
        StoreWorkshop(store, bundle, chats),
        inspector=MachineInspector(home / PROFILES),
        idle_unload_s=idle_unload_s,
    )
