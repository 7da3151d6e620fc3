from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import SLOW_BUDGET, FakeHouse, make_service

from models.store.certificate import Certificate, Way
from runtime.compensation import DEFAULT_BUDGET_PERCENT
from runtime.engine.generation import Piece
from runtime.errors import RequestError
from runtime.load.loading import Accepted
from runtime.server.errors import ApiError
from runtime.server.records import GenerationRequest, Keep
from runtime.server.service import Service
from runtime.text.sampling import SamplingOptions
from runtime.wire.requests import LoadRequest, TuneRequest

Makes = Callable[..., Service]


def ask(text: str, model: str = "small", **options: object) -> GenerationRequest:
    return GenerationRequest(
        model=model, prompt=lambda engine: engine.text_prompt(text), options=SamplingOptions(**options)
    )


async def answer(service: Service, text: str, model: str = "small") -> str:
    items = [item async for item in service.generate(ask(text, model))]
    assert isinstance(items[0], Accepted)
    return "".join(item.text for item in items[1:] if isinstance(item, Piece))


async def load(service: Service, model: str = "small", **options: object) -> list[str]:
    return [progress.message async for progress in service.load(LoadRequest(model=model, **options))]


async def until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not predicate():  # noqa: ASYNC110 -- other threads make it true
            await asyncio.sleep(0.005)


@pytest.fixture
def made(house: FakeHouse) -> Iterator[Makes]:
    """Makes a service of the house, with options; it is closed at the end."""
    services: list[Service] = []

    def make(**options: Any) -> Service:
        services.append(make_service(house, **options)[0])
        return services[-1]

    yield make
    assert all(service.close() for service in services)


async def test_states_follow_the_model(service: Service, house: FakeHouse) -> None:
    assert service.status().state == "empty"
    assert service.status().model is None
    messages = await load(service, kv="int8", k_chunk=16, context=100)
    assert messages == ["loading small", "block 0", "block 1", "block 2"]
    status = service.status()
    assert (status.state, status.model, status.kv, status.context) == ("ready", "small", "int8", 100)
    assert status.k_chunk == {"qkv": 16}
    assert (status.memory_bytes or 0) > 1_000_000
    assert service.holds("small")
    assert not service.holds("demo")
    await service.unload()
    assert service.status().state == "empty"
    assert house.engine.closed
    assert not service.holds("small")


async def test_loading_and_generating_show(service: Service, house: FakeHouse) -> None:
    loading = asyncio.create_task(load(service, "slow-to-load"))
    await until(lambda: service.status().state == "loading")
    assert service.status().model == "slow-to-load"
    house.gate.set()
    await loading
    house.engine.prefill_gate.clear()
    answering = asyncio.create_task(answer(service, "echo a", "slow-to-load"))
    await until(lambda: service.status().state == "generating")
    house.engine.prefill_gate.set()
    assert await answering == "a"
    assert service.status().state == "ready"


async def test_a_failed_load_is_told_and_the_next_may_succeed(service: Service, house: FakeHouse) -> None:
    await load(service)
    with pytest.raises(ApiError, match="quantize the model again") as failure:
        await load(service, "broken")
    assert failure.value.status == 503
    status = service.status()
    assert (status.state, status.model) == ("failed", None)
    assert "cut" in (status.error.message if status.error else "")
    assert house.engines[0].closed
    assert await answer(service, "echo again") == "again"
    assert service.status().error is None


async def test_an_unknown_model_leaves_the_loaded_one_alone(service: Service, house: FakeHouse) -> None:
    await load(service)
    with pytest.raises(ApiError) as failure:
        await load(service, "nowhere")
    assert (failure.value.status, failure.value.record.code) == (404, "model_not_found")
    assert service.status().model == "small"
    assert not house.engine.closed


async def test_a_request_loads_the_model_it_names(service: Service, house: FakeHouse) -> None:
    assert await answer(service, "echo one") == "one"
    assert await answer(service, "echo two") == "two"
    assert await answer(service, "echo three", "org/other") == "three"
    assert [request.model for request in house.loads] == ["small", "org/other"]
    assert not house.engines[0].closed, "it may be asked again"


@pytest.mark.parametrize(
    ("loaded", "tuned", "kept"),
    [
        ({"kv": "int8", "k_chunk": 8, "context": 64}, None, {"kv": "int8", "k_chunk": 8}),
        ({"k_chunk": 8}, {"budget": 20.0}, {"budget": 20.0}),
        ({"k_chunk": 8}, {}, {"budget": DEFAULT_BUDGET_PERCENT}),
        ({"budget": "exact"}, None, {"budget": "exact"}),
    ],
    ids=["options", "a budget", "the default budget", "exact answers"],
)
async def test_a_model_loaded_by_a_request_keeps_what_was_asked_of_the_last(
    service: Service, house: FakeHouse, loaded: dict[str, Any], tuned: dict[str, Any] | None, kept: dict[str, Any]
) -> None:
    await load(service, **loaded)
    if tuned is not None:
        await tune(service, **tuned)
    await answer(service, "echo x", "org/other")
    assert house.loads[-1] == LoadRequest(model="org/other", or_usual=True, **kept), "exact where it is possible"


async def test_requests_queue_in_one_thread(service: Service, house: FakeHouse) -> None:
    answers = await asyncio.gather(*(answer(service, f"echo {i}") for i in range(20)))
    assert answers == [str(i) for i in range(20)]
    assert len(house.loads) == 1
    assert len(house.engine.threads) == 1
    assert threading.get_ident() not in house.engine.threads


async def test_hanging_up_while_waiting_never_starts(service: Service, house: FakeHouse) -> None:
    await load(service)
    house.engine.prefill_gate.clear()
    first = asyncio.create_task(answer(service, "echo first"))
    await until(lambda: service.status().state == "generating")
    second = asyncio.create_task(answer(service, "echo second"))
    await until(lambda: service.status().waiting == 1)
    second.cancel()
    await asyncio.wait([second])
    house.engine.prefill_gate.set()
    assert await first == "first"
    await until(lambda: service.status().waiting == 0)
    assert len(house.engine.options) == 1


async def test_hanging_up_stops_a_load(service: Service, house: FakeHouse) -> None:
    async with aclosing(service.load(LoadRequest(model="slow-to-load"))) as reports:
        await anext(reports)
    await until(lambda: house.stopped == ["load"])
    await until(lambda: service.status().state == "empty")
    assert service.status().error is None


async def tune(service: Service, **options: object) -> list[str]:
    return [progress.message async for progress in service.tune(TuneRequest(**options))]


async def test_tuning_waits_for_the_running_answer(service: Service, house: FakeHouse) -> None:
    await load(service)
    house.engine.prefill_gate.clear()
    answering = asyncio.create_task(answer(service, "echo a"))
    await until(lambda: service.status().state == "generating")
    tuning = asyncio.create_task(tune(service, budget=10.0))
    await until(lambda: service.status().waiting == 1)
    assert not house.tunes
    house.engine.prefill_gate.set()
    assert await answering == "a"
    await tuning
    assert (service.status().budget_percent, service.status().slowdown_percent) == (10.0, 9.0)
    accepted = await anext(service.generate(ask("echo a")))
    assert isinstance(accepted, Accepted)
    assert (accepted.k_chunk, accepted.slowdown_percent) == ({"qkv": 10}, 9.0)


async def test_hanging_up_stops_tuning_and_changes_nothing(service: Service, house: FakeHouse) -> None:
    await load(service, k_chunk=16)
    async with aclosing(service.tune(TuneRequest(budget=SLOW_BUDGET))) as reports:
        await anext(reports)
        assert service.device().bandwidth_gb_s is None, "nothing is measured beside a measurement"
    await until(lambda: house.stopped == ["tune"])
    assert (service.status().state, service.status().k_chunk) == ("ready", {"qkv": 16})
    assert service.status().budget_percent is None
    assert service.device().bandwidth_gb_s == 10.0


async def test_a_budget_is_refined_once_the_runtime_rests_after_an_answer(made: Makes, house: FakeHouse) -> None:
    service = made(refine_after_s=0.02)
    await load(service)
    await tune(service, budget=10.0)
    await asyncio.sleep(0.1)
    assert not house.refined, "before the first answer, nothing is refined"
    assert await answer(service, "echo a") == "a"
    await until(lambda: house.refined == ["small"])
    assert service.status().state == "ready"
    assert service.device().bandwidth_gb_s is None, "nothing is measured beside a measurement"
    assert await answer(service, "echo b") == "b", "a request interrupts it"
    await until(lambda: len(house.refined) == 2)
    tuning = service.device().tuning
    assert tuning is not None
    assert not tuning.refined
    house.refined_gate.set()
    await until(lambda: (found := service.device().tuning) is not None and found.refined)


async def test_a_refinement_that_fails_is_not_repeated(
    made: Makes, house: FakeHouse, caplog: pytest.LogCaptureFixture
) -> None:
    service = made(refine_after_s=0.02)
    house.names.append("broken-by-refining")
    house.refined_gate.set()
    await load(service, "broken-by-refining")
    for _ in range(2):
        assert await answer(service, "echo a", "broken-by-refining") == "a"
        await asyncio.sleep(0.1)
    assert house.refined == ["broken-by-refining"]
    assert "a bug" in caplog.text


async def test_a_model_that_rested_is_loaded_for_the_new_budget(made: Makes, house: FakeHouse) -> None:
    service = made(idle_unload_s=0.05)
    await load(service, kv="int8", k_chunk=8)
    await until(lambda: service.status().state == "empty")
    await tune(service, budget=20.0)
    assert house.loads[-1] == LoadRequest(model="small", kv="int8", budget=20.0)
    assert not house.tunes, "loading tunes already"
    await until(lambda: service.status().state == "empty")
    await tune(service, budget=20.0, force=True)
    assert house.tunes == [TuneRequest(budget=20.0, force=True)]


async def test_a_failure_in_the_middle_leaves_the_model_ready(service: Service) -> None:
    with pytest.raises(ApiError, match="NaN") as failure:
        await answer(service, "echo one BREAK two")
    assert failure.value.status == 500
    assert service.status().state == "ready"
    assert await answer(service, "echo fine") == "fine"


async def test_an_unexpected_failure_does_not_tell_its_text(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    def prompt(_engine: object) -> list[int]:
        raise KeyError("a secret")

    request = GenerationRequest(model="small", prompt=prompt, options=SamplingOptions())
    with pytest.raises(ApiError) as failure:
        await anext(service.generate(request))
    assert failure.value.status == 500
    assert "secret" not in failure.value.record.message
    assert "a secret" in caplog.text
    assert await answer(service, "echo on") == "on"


async def test_too_many_waiting_requests_are_refused(made: Makes, house: FakeHouse) -> None:
    service = made(max_waiting=2)
    await load(service)
    house.engine.prefill_gate.clear()
    tasks = [asyncio.create_task(answer(service, "echo a"))]
    await until(lambda: service.status().state == "generating")
    for waiting in (1, 2):
        tasks.append(asyncio.create_task(answer(service, "echo a")))
        await until(lambda n=waiting: service.status().waiting == n)
    with pytest.raises(ApiError) as failure:
        await answer(service, "echo a")
    assert (failure.value.status, failure.value.record.code) == (503, "overloaded")
    house.engine.prefill_gate.set()
    assert await asyncio.gather(*tasks) == ["a"] * 3


async def test_an_idle_model_is_unloaded_and_comes_back_as_it_was(made: Makes, house: FakeHouse) -> None:
    service = made(idle_unload_s=0.05)
    await load(service, kv="int8", context=90)
    await until(lambda: service.status().state == "empty")
    assert house.engine.closed
    assert await answer(service, "echo back") == "back"
    assert house.loads[1] == house.loads[0]


async def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    service, house = make_service()
    await load(service)
    house.engine.prefill_gate.clear()
    running = asyncio.create_task(answer(service, "echo a"))
    await until(lambda: service.status().state == "generating")
    waiting = asyncio.create_task(answer(service, "echo b"))
    await until(lambda: service.status().waiting == 1)
    assert await asyncio.to_thread(service.close)
    for task in (running, waiting):
        with pytest.raises(ApiError) as failure:
            await task
        assert failure.value.status == 503
    assert house.engine.closed
    with pytest.raises(ApiError) as failure:
        await answer(service, "echo c")
    assert failure.value.status == 503


async def test_one_piece_of_making_at_a_time(service: Service, house: FakeHouse) -> None:
    first = service.make(lambda stream: house.pull("slow", None, stream.put, stream.cancelled))
    await anext(first)
    with pytest.raises(ApiError) as failure:
        await anext(service.make(lambda stream: None))
    assert failure.value.status == 409
    await first.aclose()
    await until(lambda: house.stopped == ["download"])

    async def again() -> list[object]:
        return [report async for report in service.make(lambda stream: house.pull("x", None, stream.put, bool))]

    async with asyncio.timeout(10):
        while True:
            try:
                assert len(await again()) == 3
                return
            except ApiError:
                await asyncio.sleep(0.01)


async def test_errors_of_making_are_told(service: Service) -> None:
    def work(_stream: object) -> None:
        raise RequestError("rtn does not make 5-bit models")

    with pytest.raises(ApiError, match="5-bit") as failure:
        await anext(service.make(work))
    assert failure.value.status == 400


async def turns(service: Service, *models: str) -> None:
    for model in models:
        assert await answer(service, f"echo {model}", model) == model


def kept(house: FakeHouse) -> list[str]:
    return [engine.name for engine in house.engines if not engine.closed]


async def test_models_answer_in_turns_without_being_loaded_again(service: Service, house: FakeHouse) -> None:
    await load(service, kv="int8", context=100)
    await turns(service, "demo", "small", "demo", "small")
    assert [request.model for request in house.loads] == ["small", "demo"]
    status = service.status()
    assert (status.model, status.context, list(status.also_loaded)) == ("small", 100, ["demo"])
    assert [own.name for own in service.all_loaded] == ["small", "demo"]
    assert service.holds("demo")
    with pytest.raises(ApiError):
        await answer(service, "echo x", "nowhere")
    assert (service.status().model, kept(house)) == ("small", ["small", "demo"])


async def test_the_least_recently_used_model_goes_where_memory_or_the_limit_says_so(
    made: Makes, house: FakeHouse
) -> None:
    service = made(max_models=2)
    await turns(service, "small", "demo", "small", "org/other")
    assert kept(house) == ["small", "org/other"]
    house.room = 1
    await turns(service, "demo")
    assert kept(house) == ["demo"]
    assert service.status().also_loaded == []


async def test_as_many_models_as_are_loaded_take_turns(service: Service, house: FakeHouse) -> None:
    await turns(service, *(["small", "demo", "org/other"] * 2))
    assert len(house.loads) == 3


async def answering(service: Service) -> asyncio.Task[str]:
    """An answer of a model that goes on until it is released."""
    task = asyncio.create_task(answer(service, "hold it"))
    await until(lambda: service.status().running == 1)
    return task


async def test_models_answer_at_the_same_time(service: Service, house: FakeHouse) -> None:
    long = await answering(service)
    await turns(service, "demo", "org/other", "demo")
    assert [one.model async for one in service.embed("demo", ["x"])] == ["demo"]
    await service.hold("demo", Keep(seconds=0))
    assert (kept(house), service.status().running) == (["small", "org/other"], 1)
    house.engines[0].held.set()
    assert await long == "it"
    assert len(set.union(*(engine.threads for engine in house.engines))) == 1


async def test_answers_go_on_while_another_model_is_loaded(
    service: Service, house: FakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, left = house.load, list[int]()

    def loading(*asked: Any, **how: Any) -> Any:
        house.engines[0].held.set()
        found = load(*asked, **how)
        left.append(house.engines[0].running)
        return found

    long = await answering(service)
    monkeypatch.setattr(house, "load", loading)
    await turns(service, "demo")
    assert (left, await long) == ([0], "it")


async def waits(service: Service, house: FakeHouse, task: asyncio.Task[Any], long: asyncio.Task[str]) -> None:
    """Check that a task waits for an answer, but its turn comes."""
    await until(lambda: service.status().waiting == 1)
    assert not task.done()
    house.engines[0].held.set()
    assert await long == "it"
    await task


@pytest.mark.parametrize(("limit", "room"), [(1, 9), (3, 1)])
async def test_a_model_without_room_waits_for_the_answers_of_others(
    made: Makes, house: FakeHouse, limit: int, room: int
) -> None:
    house.room, service = room, made(max_models=limit)
    long = await answering(service)
    gone = asyncio.create_task(turns(service, "demo"))
    await until(lambda: service.status().waiting == 1)
    gone.cancel()
    await until(lambda: service.status().waiting == 0)
    await waits(service, house, asyncio.create_task(turns(service, "demo")), long)
    assert kept(house) == ["demo"]


async def test_what_needs_a_model_for_itself_waits_for_its_answers(service: Service, house: FakeHouse) -> None:
    await turns(service, "small", "demo")
    long = await answering(service)

    async def embed() -> None:
        assert [one.model async for one in service.embed("small", ["x"])] == ["small"]

    await waits(service, house, asyncio.create_task(embed()), long)


async def test_unloading_and_forgetting_reach_all_models(service: Service, house: FakeHouse) -> None:
    await turns(service, "small", "demo")
    await service.forget("chat")
    assert [engine.forgotten for engine in house.engines] == [["chat"], ["chat"]]
    await load(service, "small", kv="int8")
    assert kept(house) == ["small"], "a model that is loaded anew is not there twice, and takes the place of another"
    await turns(service, "demo")
    await service.unload()
    assert kept(house) == []
    assert not service.holds("small")


async def test_a_model_that_fails_leaves_the_others(service: Service, house: FakeHouse) -> None:
    await turns(service, "small")
    with pytest.raises(ApiError, match="quantize the model again"):
        await answer(service, "echo x", "broken")
    assert kept(house) == ["small"]
    await turns(service, "small")
    assert [request.model for request in house.loads] == ["small", "broken"]


@pytest.mark.parametrize(("kl", "said"), [(0.01, "int4 cache: KL 0.010"), (0.5, "int4 · int4 cache: KL 0.500")])
async def test_the_cache_is_named_once_unless_it_is_not_the_default(service: Service, kl: float, said: str) -> None:
    await load(service, kv="int4")
    assert service.loaded is not None
    own = Certificate(caches=(Way(kv="int4", k_chunk=0, kl=kl), Way(kv="int8", k_chunk=0)))
    service._loaded = replace(service.loaded, certificate=own)
    assert service.device().cache.startswith(said)
