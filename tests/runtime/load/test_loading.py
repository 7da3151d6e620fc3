"""The real loader, catalogue and builder, on the bundled model."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from assets import calibration_file, demo_checkpoint_path, demo_path, evaluation_file
from models import fetch
from models.catalogue import KNOWN
from models.checkpoint import Checkpoint
from models.errors import CheckpointError, ModelError, QuantizationError, StoreError
from models.oracle import Oracle
from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.quantize import quantize
from models.recipe import Recipe
from models.spec import MixtureSpec
from models.store import Store, StoredModel, layout
from models.store.certificate import Certificate, Way
from models.store.manifest import content_of
from runtime.backends import backend
from runtime.backends.cpu.backend import CpuBackend
from runtime.backends.decoder import Decoder, DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.budget import tuning
from runtime.budget.clocks import Clocks
from runtime.budget.profile_key import profile_key
from runtime.compensation import DEFAULT_BUDGET_PERCENT, Compensation
from runtime.drafting import Speculate
from runtime.engine.engine import Engine
from runtime.errors import Cancelled, RequestError, RuntimeFailure
from runtime.kv.kinds import DEFAULT_KV, KINDS, KVKind
from runtime.load import loading
from runtime.load.catalogue import Bundle, Catalogue, ModelBuilder
from runtime.load.certificate import Reference
from runtime.load.loading import LoadedModel, Loader
from runtime.load.plan import LoadOptions
from runtime.load.prospects import MachineInspector
from runtime.measure.evaluate import perplexity
from runtime.server.errors import ApiError
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.server.service import open_service
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from runtime.wire.answers import Holding
from runtime.wire.codec import from_json
from runtime.wire.device import PromptTuning
from runtime.wire.requests import LoadRequest, QuantizeRequest, TuneRequest
from tests.grid import grid
from tests.models.conftest import TEXT, write_checkpoint
from tests.models.gguf.making import random_model, write_gguf
from tuner.offers import DecodingMode, Offers
from tuner.placement import ExpertPlacement
from tuner.profiles import ProfileStore

Loads = Callable[..., tuple[Loader, LoadedModel]]
BUNDLE = Bundle(models={"demo": demo_path()}, calibration=calibration_file(), evaluation=evaluation_file())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with one model, `org/copy`."""
    store = Store(tmp_path / "models")
    shutil.copytree(demo_path(), store.path("org/copy"))
    return store


@pytest.fixture
def catalogue(store: Store) -> Catalogue:
    return Catalogue(store, BUNDLE.models)


@pytest.fixture
def loader(catalogue: Catalogue, tmp_path: Path) -> Loader:
    return Loader(catalogue, tmp_path / "profiles")


@pytest.fixture
def loads(catalogue: Catalogue, tmp_path: Path) -> Iterator[Loads]:
    """Loads a model, with options of the loader; it is closed at the end."""
    found: list[LoadedModel] = []

    def load(
        request: LoadRequest,
        defaults: LoadOptions | None = None,
        *,
        progress: ProgressCallback = ignore_progress,
        **more: Any,
    ) -> tuple[Loader, LoadedModel]:
        own = Loader(catalogue, tmp_path / "profiles", *([] if defaults is None else [defaults]), **more)
        found.append(own.load(request, progress, never_cancelled))
        return own, found[-1]

    yield load
    for each in found:
        each.engine.close()


def test_the_catalogue_has_bundled_and_stored_models(catalogue: Catalogue) -> None:
    assert [(entry.name, entry.bundled) for entry in catalogue.entries()] == [("demo", True), ("org/copy", False)]
    found = catalogue.find("org/copy")
    assert found is not None
    assert found.bits == 4
    assert found.created > 0
    folder = catalogue.open("org/copy").path
    os.utime(folder / layout.MANIFEST, (1e9, 1e9))
    (folder / "certificate.json").touch()  # as one that grows
    assert (again := catalogue.find("org/copy")) is not None
    assert again.created == 10**9


def test_a_name_is_looked_up_without_what_only_a_list_shows(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("runtime.load.catalogue.template_in")
    monkeypatch.delattr("runtime.load.catalogue.Certificate")
    assert (found := catalogue.info("org/copy")) is not None
    assert found.summary.context > 0


@pytest.mark.parametrize("name", ["nowhere", "", "..", "../models", "/etc", "a/b/c", "org--copy", "org/copy/", "a\0b"])
def test_names_that_are_no_models(catalogue: Catalogue, name: str) -> None:
    assert catalogue.find(name) is None
    with pytest.raises(StoreError):
        catalogue.open(name)
    with pytest.raises(StoreError):
        catalogue.remove(name)


def test_a_bundled_model_stays_and_one_that_is_missing_is_not_listed(catalogue: Catalogue, store: Store) -> None:
    with pytest.raises(RequestError, match="part of the program"):
        catalogue.remove("demo")
    nowhere = Catalogue(store, {"demo": store.root / "nothing"})
    assert [entry.name for entry in nowhere.entries()] == ["org/copy"]
    catalogue.remove("org/copy")
    assert [entry.name for entry in catalogue.entries()] == ["demo"]


def test_what_is_loaded_is_what_was_asked_for(loads: Loads) -> None:
    reports: list[Progress] = []
    request = LoadRequest(model="org/copy", kv="int8", k_chunk={"qkv": 8}, context=128, backend="reference")
    _, loaded = loads(request, progress=reports.append)
    assert (loaded.name, loaded.backend, loaded.kv, loaded.context) == ("org/copy", "reference", "int8", 128)
    assert loaded.k_chunk == {"qkv": 8, "o": 0, "gate_up": 0, "down": 0, "head": 0}
    assert loaded.engine.context == 128
    assert loaded.held_bytes > loaded.kv_bytes > loaded.card_bytes == 0
    assert loaded.weight_bytes > 0
    assert [report.phase for report in reports] == ["open", "load"]
    assert "cache" in reports[-1].message


PLAIN = Compensation(k_chunk=0)
REFERENCE: dict[str, Any] = {"model": "demo", "backend": "reference"}


@pytest.mark.parametrize(
    ("losses", "asked", "kv", "said"),
    [
        ((), None, "int4", "4-bit cache: not checked"),
        ((0.012,), None, "int4", "int4 cache: KL 0.012, same top token 90 %"),
        ((0.2, 0.01), None, "int8", "int8 cache: KL 0.010, same top token 90 %; so int8 is the default"),
        ((0.2, 0.1, 0.01), None, "fp16", "so fp16 is the default"),
        ((0.12, 0.1, 0.08), None, "int4", "int4 cache: KL 0.120"),
        ((0.2, 0.01), "int4", "int4", "so int8 is the default"),
    ],
)
def test_the_default_cache_is_the_first_that_does_no_harm_and_another_that_was_asked_for_is_taken_with_a_warning(
    loads: Loads, store: Store, losses: tuple[float, ...], asked: KVKind | None, kv: KVKind, said: str
) -> None:
    folder = store.path("org/copy")
    measured = zip(("int4", "int8", "fp16"), losses, strict=False)
    caches = tuple(Way(kv=kind, k_chunk=0, kl=kl, same_percent=90.0, perplexity=4.0) for kind, kl in measured)
    Certificate(model=content_of(folder) or "", caches=caches).write(folder)
    request = LoadRequest(model="org/copy", kv=asked, k_chunk=0, context=256, backend="reference")
    _, loaded = loads(request)
    assert (loaded.kv, loaded.kv_bytes) == (kv, loads(replace(request, kv=kv))[1].kv_bytes)
    assert said in loaded.certificate.cache_words
    assert [said in problem.what for problem in loaded.problems] == [True] * (asked is not None)


def test_answers_over_a_window_are_exact_and_show_what_pages_lose() -> None:
    model = StoredModel.open_folder(demo_path(), "demo")
    exact, lossy = (
        ReferenceDecoder(model, DecoderOptions(kv=kv, context=160, slots=slots, max_rows=80))
        for kv, slots in (("fp16", 1), ("int4", 2))
    )
    answers = Reference.answers(lossy, range(300, 340))
    assert [lossy.cache.length(slot) - lossy.cache.paged_length(slot) for slot in (0, 1)] == [160, 160]
    assert answers.windows[0][80:].tolist() != answers.windows[1][80:].tolist(), "each has a seed of its own"
    same, other = (answers.measure(decoder, Way(kv=decoder.options.kv, k_chunk=0)) for decoder in (exact, lossy))
    assert lossy.cache.paged_length(0) == 64
    assert -1e-6 < same.kl < 1e-4 < other.kl < 0.01
    assert same.same_percent > 99
    begin = model.spec.bos_token_id
    begun = Reference.answers(lossy, [begin, *range(300, 500)]).windows
    assert [text[0] for text in begun] == [begin, begin], "every answer's text begins as the text does"


@pytest.mark.parametrize(
    ("defaults", "request_", "expected"),
    [
        (LoadOptions(compensation=PLAIN, kv="int8", context=128, backend="reference"), {}, ("int8", 128, "reference")),
        (
            LoadOptions(compensation=PLAIN, kv="int8", context=128, backend="reference"),
            {"kv": "fp16", "context": 64, "backend": "cpu"},
            ("fp16", 64, "cpu"),
        ),
        (LoadOptions(context=64), {**REFERENCE, "k_chunk": 0}, ("int4", 64, "reference")),
        (LoadOptions(context=64), {**REFERENCE, "k_chunk": 0, "speculate": True}, ("hierarchical", 64, "reference")),
        (
            LoadOptions(compensation=PLAIN, speculation=Speculate(gamma=2), context=64),
            REFERENCE,
            ("hierarchical", 64, "reference"),
        ),
        (
            LoadOptions(compensation=PLAIN, speculation=Speculate(gamma=2), kv="int8", context=64),
            REFERENCE,
            ("int8", 64, "reference"),
        ),
    ],
    ids=["defaults", "request", "4 bits", "4 bits for drafts", "drafts by default", "a cache that was named"],
)
def test_defaults_apply_where_a_request_says_nothing(
    loads: Loads, defaults: LoadOptions, request_: dict[str, Any], expected: tuple[str, int, str]
) -> None:
    _, found = loads(LoadRequest(**{"model": "demo", **request_}), defaults)
    assert (found.kv, found.context, found.backend) == expected


def test_experts_on_the_device_are_those_of_the_request_and_else_of_the_defaults(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the model has them. What was measured before is in the folder of profiles."""
    loader = Loader(catalogue, tmp_path / "profiles", LoadOptions(backend="reference", experts_on_device=7))
    mixture = MixtureSpec(experts=8, chosen=2, width=8, normalized=True, shared=1)
    planned: list[int | None] = []

    def plan(_: Any, wanted: LoadOptions, *, measurements: Path, store: Store) -> None:
        assert (measurements, store.root) == (tmp_path / "profiles", tmp_path / "models")
        planned.append(wanted.experts_on_device)
        raise Cancelled("enough")

    monkeypatch.setattr(loading, "plan_load", plan)
    for spec in (replace(loader._catalogue.open("demo").spec, mixture=mixture), loader._catalogue.open("demo").spec):
        monkeypatch.setattr(loader._catalogue, "open", lambda _, own=spec: SimpleNamespace(spec=own))
        for asked in (None, 3, 0, 100):
            with pytest.raises(Cancelled):
                loader.load(LoadRequest(model="demo", experts_on_device=asked), ignore_progress, never_cancelled)
    assert planned == [7, 3, 0, 9, None, None, None, None]


def test_where_experts_are_is_told() -> None:
    """By decoders that can have them in two places."""
    for experts in (ExpertPlacement(on_device=3, held=8, host_bytes=5, hit_rate=0.5), None):
        assert loading._experts(cast("Decoder", SimpleNamespace(experts=experts))) is experts
    assert loading._experts(cast("Decoder", SimpleNamespace())) is None


def test_a_context_longer_than_the_models_is_cut(catalogue: Catalogue, loads: Loads) -> None:
    longest = catalogue.entries()[0].context
    _, found = loads(LoadRequest(model="demo", context=10 * longest, backend="reference"))
    assert found.context == longest


@pytest.mark.parametrize(("asked", "usual", "slots"), [(None, None, 4), (2, None, 2), (None, 6, 6), (1, 6, 1)])
def test_so_many_requests_are_answered_at_once(loads: Loads, asked: int | None, usual: int | None, slots: int) -> None:
    defaults = LoadOptions(compensation=PLAIN, num_parallel=usual, kv="fp16")
    _, found = loads(LoadRequest(**REFERENCE, context=64, num_parallel=asked), defaults)
    options = found.engine.decoder.options  # type: ignore[attr-defined]
    assert (found.slots, options.slots, options.pages) == (slots, max(4, slots), slots)


def test_chats_share_a_pool_and_are_kept_where_there_is_a_folder(loads: Loads, tmp_path: Path) -> None:
    for chats in (None, tmp_path / "chats"):
        _, found = loads(LoadRequest(**REFERENCE), LoadOptions(compensation=PLAIN), chats=chats)
        options = found.engine.decoder.options  # type: ignore[attr-defined]
        assert (options.slots, options.pages) == (4, 4 * KINDS[DEFAULT_KV].max_pages(options.context))
        saved = found.engine._conversations.saved  # type: ignore[attr-defined]
        assert (saved is None) == (chats is None)
        found.engine.close()
        assert not (tmp_path / "chats").exists(), "nothing was said that is worth a file"


def test_a_models_chats_go_with_it(store: Store, tmp_path: Path) -> None:
    chats, content = tmp_path / "chats", content_of(store.path("org/copy"))
    chats.mkdir()
    assert content is not None
    mine, other = (chats / f"{name}-fp16-x.kv" for name in (content[:16], "0123456789abcdef"))
    for path in (mine, other):
        path.write_bytes(bytes(100))
    catalogue = Catalogue(store, {}, chats)
    loader = Loader(catalogue, tmp_path / "profiles", chats=chats)
    assert loader.held() == Holding(files=2, bytes=200)
    catalogue.remove("org/copy")
    assert [path.exists() for path in (mine, other)] == [False, True]
    assert loader.forget(None) == Holding(files=1, bytes=100)
    nowhere = Loader(catalogue, tmp_path / "profiles")
    assert nowhere.held() == nowhere.forget(None) == nowhere.forget("chat") == Holding()


@pytest.mark.parametrize("asks", [0, 1, 2])
def test_a_load_can_be_stopped_at_every_step(loader: Loader, asks: int) -> None:
    asked = iter(range(100))
    with pytest.raises(Cancelled):
        loader.load(LoadRequest(model="demo", backend="reference"), ignore_progress, lambda: next(asked) >= asks)


class Clock:
    """Compensation of 16 channels per 1024 costs so many percent, of every layer type."""

    measured = True

    def __init__(self) -> None:
        self.readings = 0
        self.before: Callable[[], object] = lambda: None
        """Done before a reading, as a timer runs steps."""
        self.types = 5
        """Layer types, of which each has its share of the percent."""

    def seconds(self, _kind: str, _n_tb: int, k_chunk: int) -> float:
        self.readings += 1
        self.before()
        return 1e-3 * (1 + k_chunk / 1600)

    def slowdown(self, k_chunk: Mapping[str, int], _n_tb: Mapping[str, int]) -> float:
        return sum(k_chunk.values()) / self.types / 16


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tuning, "clocks", lambda *_: Clocks(layers=clock, slowdown=clock.slowdown))
    return clock


@pytest.fixture
def steady(clock: Clock) -> None:
    """Clocks on which compensation costs as much of each layer type."""
    clock.types = 1


def test_a_load_is_tuned_to_its_budget(loads: Loads, clock: Clock) -> None:
    reports: list[Progress] = []
    loader, loaded = loads(LoadRequest(model="demo", budget=10, context=64), progress=reports.append)
    assert loaded.tuning is not None
    assert (loaded.tuning.budget_percent, loaded.tuning.cached) == (10, False)
    assert loaded.k_chunk == loaded.tuning.k_chunk
    assert min(loaded.k_chunk.values()) > 0
    assert {report.phase for report in reports} >= {"open", "tune"}
    wider = loader.tune(loaded, TuneRequest(budget=20), ignore_progress, never_cancelled)
    assert sum(wider.k_chunk.values()) > sum(loaded.k_chunk.values())
    readings = clock.readings
    back = loader.tune(wider, TuneRequest(budget=10), ignore_progress, never_cancelled)
    assert (back.k_chunk, clock.readings) == (loaded.k_chunk, readings)
    assert back.tuning is not None
    assert back.tuning.cached
    loader.tune(back, TuneRequest(budget=10, force=True), ignore_progress, never_cancelled)
    assert clock.readings > readings
    fixed = loader.tune(back, TuneRequest(k_chunk={"down": 5}), ignore_progress, never_cancelled)
    assert (fixed.tuning, fixed.k_chunk["down"], fixed.k_chunk["qkv"]) == (None, 5, 0)
    assert fixed.engine.decoder.options.k_chunk == fixed.k_chunk  # type: ignore[attr-defined]
    apart = from_json(TuneRequest, {"k_chunk": {**fixed.k_chunk, "layers.1.down": 64}})
    fixed = loader.tune(fixed, apart, ignore_progress, never_cancelled)
    assert (fixed.k_chunk["down"], fixed.k_chunk["layers.1.down"]) == (5, 64)
    with pytest.raises(RequestError, match=r"k_chunk names layers\.99\.down; the model's blocks are 0 to 3"):
        loader.tune(fixed, TuneRequest(k_chunk={"layers.99.down": 64}), ignore_progress, never_cancelled)
    assert fixed.engine.decoder.options.k_chunk == fixed.k_chunk  # type: ignore[attr-defined]


def test_a_block_that_the_model_lacks_is_refused(loader: Loader) -> None:
    request = LoadRequest(model="demo", k_chunk={"layers.4.o": 1})
    with pytest.raises(RequestError, match=r"k_chunk names layers\.4\.o; the model's blocks are 0 to 3"):
        loader.load(request, ignore_progress, never_cancelled)


@pytest.mark.parametrize(
    "request_",
    [TuneRequest(budget=10, prompt_budget=0), TuneRequest(k_chunk=8, prompt_budget=0)],
    ids=["budget", "k_chunk"],
)
def test_conversations_survive_tuning(loader: Loader, clock: Clock, request_: TuneRequest) -> None:
    loaded = loader.load(LoadRequest(model="demo", k_chunk=0, context=256), ignore_progress, never_cancelled)
    decoder = loaded.engine.decoder  # type: ignore[attr-defined]
    row = np.zeros(1, np.int32)
    measure = Step(tokens=row, slots=row, positions=row, logit_rows=row)
    clock.before = lambda: decoder.forward(measure)
    options = SamplingOptions(temperature=0, max_tokens=4)
    cached = []
    for step in range(3):
        *_, last = loaded.engine.generate(loaded.engine.text_prompt("hello there"), options, never_cancelled)
        assert last.usage is not None
        cached.append(last.usage.cached_tokens)
        if step == 1:
            loader.tune(loaded, request_, ignore_progress, never_cancelled)
    loaded.engine.close()
    assert cached[1] > 0
    assert cached[2] == cached[1]
    assert (clock.readings > 0) == (request_.budget is not None)


@pytest.mark.usefixtures("clock")
def test_without_a_word_the_loaders_compensation_applies(loads: Loads) -> None:
    for compensation, expected in (
        (Compensation(), DEFAULT_BUDGET_PERCENT),
        (Compensation(budget_percent=20), 20),
        (Compensation(k_chunk=7), None),
    ):
        _, found = loads(LoadRequest(model="demo", context=64), LoadOptions(compensation=compensation))
        assert (found.tuning.budget_percent if found.tuning else None) == expected
        assert expected is not None or set(found.k_chunk.values()) == {7}


def test_prompts_have_a_budget_of_their_own(loads: Loads, clock: Clock, tmp_path: Path) -> None:
    request = LoadRequest(model="demo", k_chunk=7, prompt_budget=100, context=256)
    loader, loaded = loads(request, chats=tmp_path / "chats")
    loaded = loader.refine(loaded, never_cancelled)
    engine: Any = loaded.engine
    assert loaded.prompts is not None
    assert (loaded.prompts.k_chunk, engine.decoder.options.prompt_k_chunk) == (1024, 1024)
    list(engine.generate([5, 6, 7], SamplingOptions(max_tokens=1)))
    saved = engine._conversations.saved
    loaded = loader.tune(loaded, TuneRequest(k_chunk=8, prompt_budget=100), ignore_progress, never_cancelled)
    assert engine._conversations.saved is saved
    assert any(engine._conversations.tokens(slot) for slot in range(4))
    loaded = loader.tune(loaded, TuneRequest(k_chunk=8, prompt_budget=0), ignore_progress, never_cancelled)
    assert loaded.prompts is not None
    assert (loaded.prompts.k_chunk, engine.decoder.options.prompt_k_chunk) == (0, 0)
    assert engine._conversations.saved is not saved, "files of the other compensation are not read"
    assert not any(engine._conversations.tokens(slot) for slot in range(4)), "what it had read is dropped"


def test_a_load_that_cannot_be_tuned_says_why(loader: Loader, clock: Clock) -> None:
    request = LoadRequest(model="demo", budget=10, context=64, backend="reference")
    loaded = loader.load(request, ignore_progress, never_cancelled)
    loaded.engine.close()
    assert loaded.tuning is None
    assert "reference" in loaded.problems[0].what
    clock.seconds = lambda *_: float("nan")  # type: ignore[method-assign]
    loaded = loader.load(LoadRequest(model="demo", budget=10, context=64), ignore_progress, never_cancelled)
    loaded.engine.close()
    assert (loaded.tuning, set(loaded.k_chunk.values())) == (None, {0})
    assert "without error compensation" in loaded.problems[0].what


def test_a_load_can_be_stopped_while_it_is_tuned(loader: Loader, clock: Clock) -> None:
    request = LoadRequest(model="demo", budget=10, context=64)
    with pytest.raises(Cancelled):
        loader.load(request, ignore_progress, lambda: clock.readings > 5)
    readings = clock.readings
    loader.load(request, ignore_progress, never_cancelled).engine.close()
    resumed = clock.readings - readings
    loader.load(LoadRequest(model="org/copy", budget=10, context=64), ignore_progress, never_cancelled).engine.close()
    assert resumed < clock.readings - readings - resumed, "what was measured before it was stopped is kept"


def test_the_machine(tmp_path: Path) -> None:
    facts = MachineInspector(tmp_path)(False)
    assert facts.bandwidth_gb_s is None
    assert facts.machine["cpu"]["name"]
    assert facts.machine.keys() == {"cpu", "memory", "gpu", "pcie", "power"}


async def test_the_bundled_model_answers_over_http(tmp_path: Path) -> None:
    service = open_service(tmp_path, BUNDLE)
    try:
        async with aclosing(service.load(LoadRequest(model="demo", backend="reference", context=256))) as reports:
            async for _ in reports:
                pass
        transport = httpx.ASGITransport(create_app(service, Security()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = {
                "model": "demo",
                "messages": [{"role": "user", "content": "hello"}],
                "temperature": 0,
                "max_tokens": 8,
                "logprobs": True,
                "top_logprobs": 2,
            }
            answers = [(await client.post("/v1/chat/completions", json=asked)).json() for _ in range(2)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[0] == texts[1] != ""
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        tokens = answers[0]["choices"][0]["logprobs"]["content"]
        assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in tokens)  # greedy
    finally:
        assert service.close()


async def _done(work: AsyncGenerator[Progress, None]) -> None:
    async with aclosing(work) as reports:
        async for _ in reports:
            pass


async def test_exact_answers_over_http_are_the_checkpoints(tmp_path: Path) -> None:
    """Greedy tokens as of the oracle, alone and two at a time. A budget, and exact answers again, load it again."""
    checkpoint = write_checkpoint(tmp_path / "source", dtype=torch.float16, max_position_embeddings=256, seed=9)
    store = Store(tmp_path / "models")
    quantize(checkpoint, store, Recipe(bits=3, group_size=32), name="small", calibration=TEXT)
    oracle, tokenizer = Oracle(Checkpoint.open(checkpoint)), Tokenizer(checkpoint)
    expected = {}
    for prompt in ("The quick brown fox", "five dozen liquor jugs!"):  # no two tokens are nearly as likely
        tokens = [*tokenizer.encode(prompt)]
        for _ in range(24):
            tokens.append(int(oracle.logits(torch.tensor([tokens]))[0, -1].argmax()))
        expected[prompt] = tokenizer.decode(tokens[-24:])
    service = open_service(tmp_path, BUNDLE)
    transport = httpx.ASGITransport(create_app(service, Security()))

    async def answers(*, together: bool) -> list[str]:
        async def answer(prompt: str) -> str:
            asked = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": 24}
            text: str = (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
            return text

        asked = [answer(prompt) for prompt in expected]
        return await asyncio.gather(*asked) if together else [await each for each in asked]

    try:
        await _done(service.load(LoadRequest(model="small", budget="exact")))
        status = service.status()
        assert (status.exact, status.budget, status.kv, status.backend) == (True, "exact", "fp16", "cpu")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert await answers(together=False) == await answers(together=True) == [*expected.values()]
            await _done(service.tune(TuneRequest(budget=0)))
            assert (service.status().exact, service.status().budget, service.status().kv) == (False, 0, "int4")
            assert set(await answers(together=True)).isdisjoint(expected.values())
            await _done(service.tune(TuneRequest(budget="exact")))
            assert await answers(together=True) == [*expected.values()]
            await _done(service.tune(TuneRequest(budget=0)))
            shutil.rmtree(checkpoint)
            with pytest.raises(ApiError, match="not where it was"):
                await _done(service.tune(TuneRequest(budget="exact")))
            assert service.status().budget == 0, "it stays as it was"
    finally:
        assert service.close()


@pytest.mark.parametrize("why", ["no source", "another backend", "no memory"])
def test_answers_that_cannot_be_exact_are_refused_or_the_usual_ones(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    request = LoadRequest(model="org/copy" if why == "no source" else "demo", budget="exact", context=256)
    if why == "another backend":
        request = replace(request, backend="reference")
    if why == "no memory":
        footprint = CpuBackend.footprint

        def huge(self: Any, spec: Any, sizes: Any, **more: Any) -> Any:
            found = footprint(self, spec, sizes, **more)
            return replace(found, weight_bytes=1 << 50) if sizes.exact else found

        monkeypatch.setattr(CpuBackend, "footprint", huge)
    with pytest.raises((ModelError, RuntimeFailure), match=r"not where it was|CPU backend only|memory") as refused:
        loads(request)
    monkeypatch.setattr("runtime.compensation.DEFAULT_BUDGET_PERCENT", 0.0)
    _, loaded = loads(replace(request, or_usual=True))
    assert not loaded.exact
    assert str(refused.value) in loaded.problems[0].what


def test_chats_of_exact_answers_are_saved_apart(loads: Loads, tmp_path: Path) -> None:
    """Their keys and values are others, even over the same kind of cache."""
    abouts = []
    for budget in ("exact", 0.0):
        request = LoadRequest(model="demo", budget=budget, kv="fp16", context=256)
        _, loaded = loads(request, chats=tmp_path / "chats")
        abouts.append(loaded.engine._conversations.saved._about)
    assert abouts[0].differences(abouts[1]) == ["another recipe"]


async def test_prompts_are_scored_as_eval_does(tmp_path: Path) -> None:
    """As lm-evaluation-harness asks (`local-completions`): tokens or texts, in batches, and a token more."""
    texts = ["Once upon a time, there was a little dog. It liked to run.", "The sky is blue."]
    model, service = StoredModel.open_folder(demo_path(), "demo"), open_service(tmp_path, BUNDLE)
    tokens = [Tokenizer(model.tokenizer_path).encode(text) for text in texts]
    try:
        wanted = LoadRequest(model="demo", backend="reference", context=256, k_chunk=32)
        async with aclosing(service.load(wanted)) as reports:
            async for _ in reports:
                pass
        transport = httpx.ASGITransport(create_app(service, Security()))
        asked = {"model": "demo", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = [
                (await client.post("/v1/completions", json={**asked, **change})).json()["choices"]
                for change in ({"prompt": tokens}, {"prompt": texts}, {"prompt": tokens[0], "max_tokens": 0})
            ]
    finally:
        assert service.close()
    assert [choice["logprobs"] for choice in found[0]] == [choice["logprobs"] for choice in found[1]]
    assert found[2][0]["logprobs"]["token_logprobs"] == found[0][0]["logprobs"]["token_logprobs"][:-1]
    decoder = ReferenceDecoder(model, DecoderOptions(kv=DEFAULT_KV, context=256, k_chunk=32))
    for choice, text, own in zip(found[0], texts, tokens, strict=True):
        told = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert text in "".join(told["tokens"])
        assert {len(each) for each in told.values()} == {len(own) + 1}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        nll = perplexity(decoder, own, 256, 256).nll_sum
        assert -sum(told["token_logprobs"][1:-1]) == pytest.approx(nll, rel=1e-5)
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values()), "the token more is the likeliest"


async def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    service = open_service(tmp_path, BUNDLE)
    try:
        folder = Store(tmp_path / "models").path("cut")
        shutil.copytree(demo_path(), folder)
        (folder / "outer.safetensors").write_bytes(b"")
        with pytest.raises(ApiError) as failure:
            await anext(service.load(LoadRequest(model="cut")))
        assert failure.value.status == 404
    finally:
        assert service.close()


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle with a tenth of the text that models are quantized with."""
    file = tmp_path_factory.mktemp("texts") / "calibration.md"
    file.write_text(calibration_file().read_text(encoding="utf-8")[:6000], encoding="utf-8")
    return replace(BUNDLE, calibration=file)


@pytest.mark.parametrize("bits", grid([3.0, 3.5], {3.5}))
def test_a_model_is_made_of_a_folder(store: Store, brief: Bundle, bits: float) -> None:
    reports: list[Progress] = []
    smooth, chats = bits == 3, store.root.parent / "chats"
    request = QuantizeRequest(
        source=str(demo_checkpoint_path()), bits=bits, name="three", smooth_attention=smooth, force=True
    )
    shutil.move(store.path("org/copy"), store.path("three"))
    chats.mkdir()
    replaced = chats / f"{(content_of(store.path('three')) or '')[:16]}-fp16-x.kv"
    replaced.touch()
    made = ModelBuilder(store, brief, chats).quantize(request, reports.append, never_cancelled)
    assert (made.name, made.bits, made.smooth_attention) == ("three", bits, smooth)
    assert store.open("three").recipe.smooth_attention == smooth
    assert not replaced.exists(), "the model that it belonged to is gone"
    assert set(store.open("three").recipe.block_bits or (3,)) == ({3} if bits == 3 else {3, 4})
    assert made.perplexity_after is not None
    assert made.certificate is not None
    assert made.certificate.startswith("k_chunk 16: KL ")
    opened = store.open("three")
    reference = Reference.of(opened)
    assert reference is not None
    window, half = torch.from_numpy(reference.windows[1])[None], len(reference.windows[1]) // 2
    full = Oracle(Checkpoint.open(demo_checkpoint_path())).logits(window)[0, half - 1 : -1].float().log_softmax(-1)
    own = reference.outline.rows(half, 2 * half)
    leaders = full.topk(own.tokens.shape[1])
    np.testing.assert_allclose(own.probabilities[:, :-1], leaders.values.exp(), rtol=1e-3, atol=1e-6)
    assert np.mean(own.tokens == leaders.indices.numpy()) > 0.99, "but where two are as likely"
    assert reports
    assert "three" in [info.name for info in store.list()]
    file = store.path("three") / layout.REFERENCE
    tensors = load(file.read_bytes())
    for wrong in ({"lengths": tensors["lengths"][:-1]}, {"tokens": tensors["tokens"] + 9999}):
        file.write_bytes(save(tensors | wrong))
        with pytest.raises(StoreError, match="is damaged"):
            Reference.of(opened)


def test_a_model_is_made_of_a_known_one(
    store: Store, brief: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / KNOWN["smollm2-135m"].file, random_model("Llama"), kind="Q4_1")
    monkeypatch.setattr(
        fetch, "fetch", lambda model, its_store, *_: {("smollm2-135m", store): file}[model.name, its_store]
    )
    builder = ModelBuilder(store, brief)
    assert builder.pull("smollm2-135m", None, ignore_progress, never_cancelled) == str(file)
    request = QuantizeRequest(source="smollm2-135m", name="smollm2-135m")
    assert builder.quantize(request, ignore_progress, never_cancelled).name == "smollm2-135m"
    made = builder.quantize(QuantizeRequest(source=str(file), bits=3), ignore_progress, never_cancelled)
    assert made.name == "smollm2-135m-trellis-3bit"
    as_run_does = QuantizeRequest(source=str(file), bits=3, keep=True)
    assert builder.quantize(as_run_does, ignore_progress, never_cancelled).method == "kept"


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "nowhere", "a/b/c", "a/b.gguf"])
def test_a_source_that_is_nothing(store: Store, source: str) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        ModelBuilder(store, BUNDLE).quantize(QuantizeRequest(source=source), ignore_progress, never_cancelled)


def test_without_a_calibration_text_residuals_are_refused(store: Store) -> None:
    request = QuantizeRequest(source=str(demo_checkpoint_path()))
    with pytest.raises(QuantizationError):
        ModelBuilder(store, Bundle()).quantize(request, ignore_progress, never_cancelled)


def test_speculation_is_asked_for_with_the_load_and_stays_with_another_budget(loader: Loader, clock: Clock) -> None:
    request = LoadRequest(model="demo", k_chunk=64, prompt_budget=0, context=256, speculate=True, gamma=3)
    loaded = loader.load(request, ignore_progress, never_cancelled)
    try:
        engine: Any = loaded.engine
        assert loaded.kv == "hierarchical"
        assert engine.speculates
        *_, last = engine.generate([5, 6, 7], SamplingOptions(temperature=0, max_tokens=20))
        assert last.usage.speculation.gamma == 3
        loaded = loader.tune(loaded, TuneRequest(k_chunk=8, prompt_budget=0), ignore_progress, never_cancelled)
        assert engine.speculates
    finally:
        loaded.engine.close()
    plain = loader.load(LoadRequest(model="demo", k_chunk=0, context=256), ignore_progress, never_cancelled)
    plain.engine.close()
    assert plain.speculation is None
    request = LoadRequest(model="demo", k_chunk=0, kv="int8", context=256, speculate=True)
    copied = loader.load(request, ignore_progress, never_cancelled)
    engine = copied.engine
    engine.close()
    assert not engine.speculates, "such a cache has no draft"


def test_sensitive_layers_are_found_on_the_evaluation_text(
    catalogue: Catalogue, loader: Loader, tmp_path: Path
) -> None:
    reading = Loader(catalogue, tmp_path / "profiles", evaluation=evaluation_file())
    how: Any = {"k_chunk": 0, "prompt_budget": 0, "context": 512, "speculate": True, "gamma": 2, "sensitive_layers": 2}
    loaded = reading.load(LoadRequest(model="demo", **how), ignore_progress, never_cancelled)
    engine: Any = loaded.engine
    engine.close()
    assert len(engine.decoder.options.sensitive_layers) == 2
    with pytest.raises(RequestError, match="320 tokens of text at least"):
        loader.load(LoadRequest(model="demo", **how), ignore_progress, never_cancelled)


@pytest.mark.parametrize(("speculate", "drafts"), [(None, True), (False, False)])
def test_what_was_measured_to_be_best_is_taken_with_the_load_and_with_another_budget(
    loads: Loads, clock: Clock, tmp_path: Path, speculate: bool | None, drafts: bool
) -> None:
    common: dict[str, Any] = {"target": "residual", "perplexity": 9.0}
    ways = (
        DecodingMode(target="plain", gamma=0, seconds=0.010, perplexity=12.0),
        DecodingMode(gamma=0, seconds=0.011, **common),
        DecodingMode(gamma=2, seconds=0.008, acceptance_rate=0.9, **common),
    )
    model = StoredModel.open_folder(demo_path(), "demo")
    key = profile_key(backend("cpu").device(DecoderOptions()), "cpu", model)
    offers = (Offers(budget_percent=20.0, ways=ways, full=None, seconds=1.0, date=""),)
    ProfileStore(tmp_path / "profiles").update(key, lambda profile: replace(profile, offers=offers))
    request = LoadRequest(model="demo", kv="hierarchical", budget=20, prompt_budget=0, context=256, speculate=speculate)
    loader, loaded = loads(request)
    engine: Any = loaded.engine
    assert engine.speculates is drafts
    assert set(loaded.k_chunk.values()) == {1024} == {engine.decoder.options.k_chunk}
    assert loaded.tuning is not None
    assert loaded.tuning.measured_slowdown_percent == pytest.approx(-20 if drafts else 10)
    other = loader.tune(loaded, TuneRequest(budget=10, prompt_budget=0), ignore_progress, never_cancelled)
    assert not engine.speculates
    assert max(other.k_chunk.values()) < 1024
    loader.tune(other, TuneRequest(budget=20, prompt_budget=0), ignore_progress, never_cancelled)
    assert engine.speculates is drafts


@pytest.mark.usefixtures("steady")
def test_prompts_are_tuned_behind_the_first_answer(catalogue: Catalogue, tmp_path: Path) -> None:
    """On a battery too. Conversations read without compensation are forgotten; a tuning that is stopped begins anew."""
    loader = Loader(catalogue, tmp_path / "profiles", LoadOptions(context=256))
    loaded = loader.load(LoadRequest(model="demo"), ignore_progress, never_cancelled)
    engine = loaded.engine
    assert isinstance(engine, Engine)
    try:
        prompt = engine.chat_prompt([{"role": "user", "content": "What is a slowdown budget?"}])

        def cached() -> int:
            *_, last = engine.generate(prompt, SamplingOptions(temperature=0, max_tokens=1))
            assert last.usage is not None
            return last.usage.cached_tokens

        assert (loaded.prompts, cached()) == (PromptTuning.later(20.0), 0)
        assert PromptTuning.later(20.0).pending
        assert engine.decoder.options.prompt_k_chunk == 0
        polled = iter([False] * 3)
        assert loader.refine(loaded, lambda: next(polled, True)) is loaded
        assert engine.decoder.options.prompt_k_chunk == 0
        assert cached() == len(prompt) - 1
        tuned = loader.refine(loaded, never_cancelled)
        assert tuned.prompts is not None
        assert not tuned.prompts.pending
        assert engine.decoder.options.prompt_k_chunk == tuned.prompts.k_chunk
        assert cached() == (0 if tuned.prompts.k_chunk else len(prompt) - 1)
    finally:
        engine.close()
    again = loader.load(LoadRequest(model="demo"), ignore_progress, never_cancelled)
    again.engine.close()
    assert again.prompts == replace(tuned.prompts, cached=True)


def test_an_interrupted_refinement_leaves_the_decoder_as_it_was_and_continues(
    catalogue: Catalogue, tmp_path: Path, steady: None
) -> None:
    """It keeps a conversation too: the same prompt is answered from the cache, with the same tokens."""
    defaults = LoadOptions(compensation=Compensation(budget_percent=10.0, prompt_budget_percent=0.0), context=256)
    loader = Loader(catalogue, tmp_path / "profiles", defaults, evaluation=evaluation_file())
    loaded = loader.load(LoadRequest(model="demo"), ignore_progress, never_cancelled)
    try:
        engine = loaded.engine
        assert isinstance(engine, Engine)
        prompt = engine.chat_prompt([{"role": "user", "content": "What is a slowdown budget?"}])

        def answered() -> tuple[str, int]:
            pieces = list(engine.generate(prompt, SamplingOptions(temperature=0, max_tokens=8)))
            assert pieces[-1].usage is not None
            return "".join(piece.text for piece in pieces), pieces[-1].usage.cached_tokens

        text, _ = answered()
        before = engine.decoder.options
        for steps in (1, 50):
            polled = iter([False] * steps)
            assert loader.refine(loaded, lambda polled=polled: next(polled, True)) == loaded
            assert engine.decoder.options == before
            assert answered() == (text, len(prompt) - 1)
        refined = loader.refine(loaded, never_cancelled)
        assert refined.tuning is not None
        assert refined.tuning.refined
        assert refined.tuning.measured_slowdown_percent <= 10
        assert refined.k_chunk == engine.decoder.options.k_chunk == refined.tuning.k_chunk
        assert loader.refine(refined, lambda: pytest.fail("it is refined already")) is refined
    finally:
        loaded.engine.close()
    again = loader.load(LoadRequest(model="demo"), ignore_progress, never_cancelled)
    again.engine.close()
    assert again.tuning == replace(refined.tuning, cached=True)
    assert again.k_chunk == refined.k_chunk


@pytest.mark.parametrize("hindered", ["battery", "conversations"])
def test_nothing_is_refined_on_a_battery_or_at_a_conversations_cost(
    hindered: str, loads: Loads, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = LoadOptions(compensation=Compensation(budget_percent=10.0, prompt_budget_percent=0.0), context=256)
    loader, found = loads(LoadRequest(model="demo"), defaults, evaluation=evaluation_file())
    assert isinstance(found.engine, Engine)
    if hindered == "battery":
        monkeypatch.setattr(loading, "on_battery", lambda: True)
    else:
        for first in range(found.engine.decoder.options.slots):
            list(found.engine.generate([5 + first, 7, 8], SamplingOptions(temperature=0, max_tokens=1)))
    assert loader.refine(found, lambda: pytest.fail("nothing is to be measured")) is found
