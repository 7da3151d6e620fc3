"""Load plan of a stored model: backend and the reason for it, memory, preparation, opening."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from models.errors import ModelError, check_needed
from models.packed import SourceWeights, Weights
from models.progress import ProgressCallback, ignore_progress
from models.recipe import Recipe
from models.store import Store, StoredModel
from models.store.certificate import Certificate
from runtime.backends import AUTO, NO_EXPERTS, AnyBackend, ModelSizes, Presence, backend, backends
from runtime.backends.decoder import Decoder, DecoderOptions, KVKind, Selector
from runtime.compensation import CHUNK, Compensation, check_blocks
from runtime.drafting import Drafts
from runtime.engine.engine import Engine
from runtime.errors import BackendError, OutOfMemoryError, Problem, RequestError, RuntimeFailure
from runtime.kv.kinds import cache_for
from runtime.load.expected import why_faster
from runtime.load.memory import CONVERSATIONS, DEFAULT_CONTEXT, MemoryPlan, plan
from runtime.text.tokenizer import Tokenizer
from tuner.detect import MemoryInfo

logger = logging.getLogger(__name__)
EXACT_KV: KVKind = "fp16"
"""Kind of cache of exact answers, unless another is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A backend that can run here."""

    backend: AnyBackend
    presence: Presence
    reason: str
    """The reason for this choice, in one sentence."""


def candidates(backend_name: str = AUTO) -> Iterator[Candidate]:
    """The backends that can run here, best first; probed lazily.

    Args:
        backend_name: Name of the only one to probe, or `auto` for all.

    Raises:
        BackendError: an unknown backend, or one requested by name that cannot run here.
    """
    if backend_name != AUTO:
        yield _requested(backend(backend_name))
        return
    out: dict[str, str] = {}
    for runner in backends():
        presence = runner.probe()
        if presence.usable:
            yield Candidate(backend=runner, presence=presence, reason="; ".join([*out.values(), presence.reason]))
        else:
            out.setdefault(presence.reason, f"{presence.reason}, so {runner.label} is not used")


def _sharing(asked: LoadOptions, blocks: int) -> Iterator[Candidate]:
    """The candidates that put as many blocks on a GPU as was asked for.

    Raises:
        BackendError: as `candidates`.
        RequestError: there are not so many, or another backend was asked for.
    """
    wanted = asked.layers_on_device
    if wanted is None:
        yield from candidates(asked.backend)
        return
    if not 0 <= wanted <= blocks:
        raise RequestError(
            f"{wanted} blocks on the GPU were requested, and the model has {blocks}: choose 0 to {blocks}"
        )
    if asked.backend != AUTO:
        raise RequestError(
            f"{wanted} blocks on the GPU were requested, and the backend {asked.backend}: leave one of them at auto"
        )
    for candidate in candidates(AUTO):
        on_device = candidate.presence.memory is not None
        shares = candidate.backend.name == "shared"
        if not on_device or (shares if 0 < wanted < blocks else wanted and not shares):
            yield candidate


def _requested(runner: AnyBackend) -> Candidate:
    presence = runner.probe()
    if not presence.usable:
        todo = f": {presence.fix}" if presence.fix else ""
        raise BackendError(f"{runner.label} cannot run here, because {presence.reason}{todo}; or use another backend")
    return Candidate(backend=runner, presence=presence, reason=f"{runner.label} was requested")


def kept_here(folder: Path, tell: Callable[[str], object]) -> Recipe | None:
    """The recipe of `models.quantize.kept_by_default`; None as well where a card would run the model, but not with it.

    Args:
        folder: A checkpoint's folder or GGUF file.
        tell: Takes the sentence that says so.

    Raises:
        ModelError: the checkpoint is damaged or not supported.
        BackendError: no backend can run here.
    """
    from models.checkpoint import Checkpoint
    from models.quantize import kept_by_default

    recipe = kept_by_default(folder)
    if recipe is None:
        return None
    spec = Checkpoint.open(folder).spec
    for candidate in candidates():
        try:
            candidate.backend.footprint(spec, ModelSizes(weight_bytes=0), compensated=False)
        except BackendError:
            continue
        try:
            candidate.backend.footprint(spec, ModelSizes(weight_bytes=0, recipe=recipe), compensated=False)
        except BackendError as error:
            tell(f"{error}, so they are rounded; `quantize --method kept` keeps them, for the processor")
            return None
        break
    return recipe


def open_decoder(
    model: Weights, options: DecoderOptions, backend_name: str = AUTO, progress: ProgressCallback = ignore_progress
) -> tuple[Decoder, str]:
    """Load a model on a backend.

    Args:
        model: The stored model.
        options: How to run it.
        backend_name: Name of a backend, or `auto`: the first that can run here and accepts the model.
        progress: See `runtime.backends.Backend.open`.

    Returns:
        The decoder, and a sentence that explains the choice of the backend.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: the backend does not have enough memory.
        RequestError: options that do not fit the model.
    """
    if not 1 <= options.context <= model.spec.max_context:
        raise RequestError(
            f"a context of {options.context} tokens was requested, and the model knows positions up to "
            f"{model.spec.max_context}: choose a context from 1 to {model.spec.max_context}"
        )
    failure: BackendError | OutOfMemoryError | None = None
    for candidate in candidates(backend_name):
        label = candidate.backend.label
        try:
            decoder = candidate.backend.open(model, options, progress)
        except (BackendError, OutOfMemoryError) as error:
            if backend_name != AUTO:
                raise
            logger.warning("%s cannot run this model, so another one is tried: %s", label, error)
            if failure is None:
                failure, failed = error, label
            continue
        if failure is None:
            return decoder, candidate.reason
        return decoder, f"{failed} cannot run this model ({failure}), so {label} does"
    raise failure or BackendError("no backend can run here")


def open_engine(
    model: StoredModel, options: DecoderOptions, backend_name: str = AUTO, progress: ProgressCallback = ignore_progress
) -> Engine:
    """Load a model with its tokenizer, ready to answer.

    Returns:
        The engine; its `reason` explains the choice of the backend.

    Raises:
        BackendError: as `open_decoder`, or the tokenizer cannot be read.
        OutOfMemoryError: as `open_decoder`.
        RequestError: as `open_decoder`.
    """
    tokenizer = Tokenizer(model.tokenizer_path)
    decoder, reason = open_decoder(model, options, backend_name, progress)
    ends = {*model.spec.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    return Engine(decoder, tokenizer, name=model.name, eos_token_ids=sorted(ends), reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model; None leaves a choice to the program."""

    compensation: Compensation = field(default_factory=Compensation)
    """A fixed k_chunk, slowdown budgets, or exact answers."""
    speculation: Drafts = None
    """None: as measured to be best; False: no drafts."""
    kv: KVKind | None = None
    """Kind of KV cache; None: `runtime.kv.kinds.cache_for` chooses, by the model's certificate."""
    context: int | None = None
    """Tokens; None: as many as fit, up to a default."""
    backend: str = AUTO
    """Which backend; `auto`: the first that can run here and accepts the model."""
    experts_on_device: int | None = None
    """Experts of each block on a GPU; None: as many as fit."""
    layers_on_device: int | None = None
    """First blocks on a GPU, where the processor runs the others; None: all if they fit, else as many as do."""
    num_parallel: int | None = None
    """Most requests answered at the same time, beside which further chats stay cached; None: one, and no other chat."""
    select: Selector = "approx"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The plan of a load. `runtime.load.loading.load` carries it out."""

    model: StoredModel
    asked: LoadOptions
    """How it is to be loaded."""
    backend_name: str
    """Name of the backend to open; `auto` may fall back to another than the planned one."""
    backend: AnyBackend
    memory: MemoryPlan
    options: DecoderOptions
    """Options of the decoder; without compensation if a budget is applied later."""
    passed_over: str | None = None
    """Why a better backend that can run here is not used; None: none was passed over."""
    inexact: Problem | None = None
    """Why answers are not exact, as they were wanted to be if possible."""

    @property
    def is_cut(self) -> bool:
        """Whether more memory would make it faster, or its context longer where none was asked for."""
        usual = min(self.model.spec.max_context, DEFAULT_CONTEXT)
        short = self.asked.context is None and self.memory.context < usual
        return short or bool(self.memory.host_bytes) or self.memory.rest is not None or self.passed_over is not None

    def prepare(self, progress: ProgressCallback, *, ahead: bool = False) -> None:
        """Compile what the model needs on its backend; `ahead` waits for what would compile in the background."""
        compensated = self.asked.compensation.possible
        self.backend.prepare(self.model, self.options.kv, compensated=compensated, ahead=ahead, progress=progress)

    def open_decoder(self, progress: ProgressCallback = ignore_progress) -> Decoder:
        """Open the decoder alone; arguments and errors as of the function `open_decoder`."""
        return open_decoder(self.model, self.options, self.backend_name, progress)[0]

    def open_engine(self, progress: ProgressCallback = ignore_progress) -> Engine:
        """Open the decoder with its tokenizer. Budgets are not applied yet."""
        engine = open_engine(self.model, self.options, self.backend_name, progress)
        engine.parallel = min(self.asked.num_parallel or 1, self.options.slots)
        if self.passed_over is not None:
            engine.reason = f"{self.passed_over}; so {self.backend.label} runs the model"
        return engine


def plan_load(
    model: StoredModel,
    asked: LoadOptions,
    *,
    memory: MemoryInfo | None = None,
    measurements: Path | None = None,
    store: Store | None = None,
) -> LoadPlan:
    """Choose a backend that the model fits: a model too large for the GPU, or whose layers it lacks, may fit the CPU.

    Args:
        model: The stored model.
        asked: How to load it.
        memory: Free main memory; None: looked up.
        measurements: Folder where the memory's measured bandwidth is stored; None: where needed, it is measured again.
        store: Knows the sources of models, for exact answers.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: not enough memory.
        RequestError: as `runtime.load.memory.plan`, or a k_chunk names blocks that the model lacks.
        ModelError: answers are to be exact, and the source is not at hand, or computes something else beside its
            matrices.
    """
    if not asked.compensation.exact:
        return _planned(model, asked, None, memory, measurements)
    try:
        return _planned(model, asked, source_of(model, store), memory, measurements)
    except (ModelError, RuntimeFailure) as error:
        if not asked.compensation.or_usual:
            raise
        what = f"{model.name} does not answer exactly, as the settings want, but with the default budget: {error}"
    fix = "do what it says, or choose another budget (F3, `lowbit-chat config set budget`)"
    usual = replace(asked, compensation=Compensation())
    problem = Problem(what=what, fix=fix, failure=True)
    return replace(_planned(model, usual, None, memory, measurements), inexact=problem)


def source_of(model: StoredModel, store: Store | None) -> SourceWeights:
    """The source's own weights.

    Raises:
        ModelError: as `plan_load`, or the program is installed without what opens a checkpoint.
        RequestError: they can't be multiplied with.
    """
    check_needed("answering in full precision")
    if model.spec.mixture is not None:
        raise RequestError(NO_EXPERTS)
    from models.exact import ExactSource
    from models.origins import Origins

    assert store is not None, "who asks for exact answers knows where models are stored"
    return ExactSource(Origins(store).source(model.info), model)


def _planned(
    model: StoredModel,
    asked: LoadOptions,
    source: SourceWeights | None,
    memory: MemoryInfo | None,
    measurements: Path | None,
) -> LoadPlan:
    """`plan_load`, once the source's own weights are at hand, where they are to answer."""
    spec, summary, compensation = model.spec, model.info.summary, asked.compensation
    check_blocks(compensation.by_type, spec.num_layers)
    exact = source is not None
    kv = cache_for(
        asked.kv or (EXACT_KV if exact else None), drafts=bool(asked.speculation), checked=Certificate.of(model.path).kv
    )
    block = None if asked.speculation is False else model.mtp
    sizes = ModelSizes(
        weight_bytes=summary.gpu_bytes,
        residual_bytes=summary.residual_bytes,
        whole=CHUNK in compensation.by_type.values(),
        exact=exact,
        recipe=model.recipe,
        mtp=None if block is None else block.spec,
        mtp_bytes=0 if block is None else model.mtp_bytes,
    )
    failure: OutOfMemoryError | BackendError | None = None
    passed_over: str | None = None
    waiting: LoadPlan | None = None  # For the next backends, which may be expected to be faster than the card's link
    card, link_gb_s = "", None
    for candidate in _sharing(asked, spec.num_layers):
        backend, free = candidate.backend, candidate.presence.memory
        plan_of = partial(
            plan,
            spec,
            kv=kv,
            context=asked.context,
            slots=max(CONVERSATIONS, asked.num_parallel) if asked.num_parallel else 1,
            shared=True,
            parallel=asked.num_parallel or 1,
            memory=free or memory,
            experts_on_device=asked.experts_on_device,
            layers_on_device=asked.layers_on_device,
            main=memory,
        )
        try:
            footprint = backend.footprint(spec, sizes, compensated=compensation.possible)
            rows, planned = _most_rows(partial(plan_of, footprint), backend.step_rows)
        except (BackendError, OutOfMemoryError) as error:
            failure, passed_over = error, str(error)
            if isinstance(error, OutOfMemoryError) and free is None:
                break  # no other backend needs less main memory
            level = logging.WARNING if isinstance(error, OutOfMemoryError) else logging.INFO
            logger.log(level, "%s is passed over: %s", backend.label, error)
            continue
        options = DecoderOptions(
            kv=kv,
            context=planned.context,
            slots=planned.slots,
            pages=planned.pages,
            k_chunk=compensation.by_type,
            experts_on_device=planned.experts_on_device if planned.experts else None,
            layers_on_device=planned.layers_on_device,
            select=asked.select,
            exact=source,
            max_rows=rows,
            mtp=footprint.mtp is not None,
        )
        fitting = LoadPlan(
            model=model,
            asked=asked,
            backend_name=asked.backend if passed_over is None and asked.layers_on_device is None else backend.name,
            backend=backend,
            memory=planned,
            options=options,
            passed_over=passed_over,
        )
        gpu = candidate.presence.gpu
        if planned.host_bytes and asked.backend == AUTO and asked.experts_on_device is None and gpu is not None:
            waiting, passed_over, card, link_gb_s = fitting, "", gpu.name, backend.link_gb_s()
            continue
        if waiting is None:
            return fitting
        faster = why_faster(model, waiting.memory, planned, backend.label, card, link_gb_s, measurements)
        if faster is not None:
            logger.info("%s is passed over: %s", waiting.backend.label, faster)
            return replace(fitting, passed_over=faster)
    if waiting is not None:
        return waiting
    raise failure or BackendError("no backend can run here")


def _most_rows(plan_of: Callable[..., MemoryPlan], choices: Sequence[int]) -> tuple[int, MemoryPlan]:
    """The most rows per step whose buffers and windows leave context and slots as the fewest rows would have them.

    Args:
        plan_of: Plans for a number of `rows`.
        choices: Numbers of rows, most first.

    Raises:
        OutOfMemoryError: even the fewest do not fit.
    """
    fewest = plan_of(rows=choices[-1])
    for rows in choices[:-1]:
        try:
            planned = plan_of(rows=rows)
        except OutOfMemoryError:
            continue
        if (planned.context, planned.slots, planned.contexts) == (fewest.context, fewest.slots, fewest.contexts):
            return rows, planned
    return choices[-1], fewest
