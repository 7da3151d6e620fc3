from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "server"))
from fake_engine import CONTEXT, FakeHouse, entry, make_service

from app.client import RuntimeClient
from app.errors import (
    AccessError,
    AnswerError,
    BusyError,
    ClientError,
    ConnectionLostError,
    ContextLengthError,
    NotFoundError,
    ProtocolError,
    RequestRefusedError,
    UnavailableError,
)
from app.protocol import ChatOptions
from models.progress import Progress
from runtime.server.security import Security
from runtime.server.serve import bind, create_app, listen
from runtime.text.reasoning import switch
from runtime.wire.answers import Holding, Quantized
from runtime.wire.codec import to_json
from runtime.wire.requests import (
    InspectedMessage,
    Inspection,
    InspectRequest,
    LoadRequest,
    PullRequest,
    QuantizeRequest,
    TuneRequest,
)

HELLO = [{"role": "user", "content": "echo hello there"}]


@pytest.fixture
def house() -> FakeHouse:
    return FakeHouse()


@pytest.fixture
async def client(house: FakeHouse) -> AsyncIterator[RuntimeClient]:
    """A client of a real server on loopback, in this loop."""
    service, _ = make_service(house)
    listener = bind("127.0.0.1", 0)
    stop, started = asyncio.Event(), asyncio.Event()
    security = Security(token="t", management_token="t")
    serving = asyncio.create_task(listen(service, security, listener, stop, started.set))
    await started.wait()
    client = RuntimeClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "t")
    yield client
    await client.aclose()
    stop.set()
    assert await serving


def scripted(answer: Callable[[httpx.Request], httpx.Response]) -> RuntimeClient:
    return RuntimeClient("http://127.0.0.1:1", "t", transport=httpx.MockTransport(answer))


async def collect(reports: AsyncIterator[Any]) -> list[Any]:
    return [report async for report in reports]


async def until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not predicate():  # noqa: ASYNC110 -- other threads make it true
            await asyncio.sleep(0.005)


async def test_status_and_models(client: RuntimeClient) -> None:
    status = await client.status()
    assert (status.state, status.model, status.error) == ("empty", None, None)
    models = await client.models()
    assert [model.name for model in models if model.bundled] == ["demo"]
    assert not any(model.loaded for model in models)


async def test_load_chat_and_remove(client: RuntimeClient, house: FakeHouse) -> None:
    reports = await collect(client.load(LoadRequest(model="small", kv="int8", k_chunk=4)))
    assert reports[-1] == Progress(phase="load", done=2, total=3, unit="blocks", message="block 2")
    assert house.loads[0].kv == "int8"
    deltas = await collect(client.chat(HELLO, ChatOptions(temperature=0.3, max_tokens=50, stop=["END"])))
    assert "".join(delta.text for delta in deltas) == "hello there"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].timings is not None
    assert deltas[-1].timings.completion_tokens == 2
    assert house.engine.options[-1].stop == ("END",)
    assert house.engine.options[-1].temperature == 0.3
    assert (await client.status()).state == "ready"
    await client.remove("small")
    assert house.removed == ["small"]
    with pytest.raises(ClientError, match="no model"):
        await collect(client.chat(HELLO, ChatOptions()))


async def test_a_chat_has_a_name_and_can_be_forgotten(client: RuntimeClient, house: FakeHouse) -> None:
    await collect(client.load(LoadRequest(model="small")))
    for chat in ("mine", None):
        await collect(client.chat(HELLO, ChatOptions(chat=chat)))
    assert house.engine.chats == ["mine", None]
    caches = await client.caches()
    assert (caches.files, caches.bytes) == (3, 3000)
    assert caches.kinds["int4"].context == 77
    assert await client.forget("mine") == Holding(files=2, bytes=2000)
    await client.forget()
    assert house.forgotten == house.engine.forgotten == ["mine", None]


async def test_the_last_message_is_continued(client: RuntimeClient, house: FakeHouse) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "echo on"}]
    await collect(client.chat(messages, ChatOptions(model="small", continue_final=True)))
    assert house.engine.trims == [False]


async def test_reasoning_is_switched_on_and_its_tag_received(client: RuntimeClient) -> None:
    options = ChatOptions(model="small", chat_template_kwargs=switch("on"), reasoning_in_content=True)
    deltas = await collect(client.chat(HELLO, options))
    assert "".join(delta.text for delta in deltas) == "<think>\nhello there"


async def test_a_model_that_rested_answers_again(client: RuntimeClient) -> None:
    await collect(client.load(LoadRequest(model="small")))
    await client.unload()
    deltas = await collect(client.chat(HELLO, ChatOptions()))
    assert "".join(delta.text for delta in deltas) == "hello there"


@pytest.mark.parametrize("way", ["the answer is closed", "its reader is cancelled"])
async def test_an_answer_that_is_left_is_cancelled(client: RuntimeClient, house: FakeHouse, way: str) -> None:
    answer = client.chat([{"role": "user", "content": "slow 190"}], ChatOptions(model="small"))
    if way == "the answer is closed":
        async with aclosing(answer) as deltas:
            async for delta in deltas:
                if delta.text:
                    break
    else:
        task = asyncio.create_task(collect(answer))
        await until(lambda: bool(house.engines) and house.engine.steps > 0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    await until(lambda: house.engine.cancellations == 1)


@pytest.mark.parametrize("work", ["load", "quantize", "pull"])
async def test_closing_the_progress_stops_the_work(client: RuntimeClient, house: FakeHouse, work: str) -> None:
    started = {
        "load": lambda: client.load(LoadRequest(model="slow-to-load")),
        "quantize": lambda: client.quantize(QuantizeRequest(source="slow")),
        "pull": lambda: client.pull(PullRequest(name="slow")),
    }[work]()
    async with aclosing(started) as reports:
        async for _ in reports:
            break
    await until(lambda: len(house.stopped) == 1)
    assert (await client.status()).state == "empty"


async def test_tuning_and_the_device(client: RuntimeClient, house: FakeHouse) -> None:
    with pytest.raises(BusyError, match="no model"):
        await collect(client.tune(TuneRequest(budget=5)))
    await collect(client.load(LoadRequest(model="small", budget=2.5)))
    assert house.loads[0].budget == 2.5
    assert (await client.device()).tuning is None
    reports = await collect(client.tune(TuneRequest(budget=10, force=True)))
    assert [report.phase for report in reports] == ["tune"] * 3
    status = await client.status()
    assert (status.budget_percent, status.slowdown_percent, status.n_tb) == (10, 9, None)
    device = await client.device()
    assert device.tuning is not None
    assert device.tuning.curve[0].points == ((0, 1.0), (8, 1.25))
    assert device.problems[0].fix == "open a window"
    deltas = await collect(client.chat(HELLO, ChatOptions()))
    assert deltas[-1].timings is not None
    assert (deltas[-1].timings.k_chunk, deltas[-1].timings.slowdown_percent) == ({"qkv": 10}, 9)
    await collect(client.tune(TuneRequest(k_chunk=4)))
    assert (await client.status()).k_chunk == {"qkv": 4}


async def test_quantize_and_pull_end_with_what_was_made(client: RuntimeClient, tmp_path: Path) -> None:
    reports = await collect(client.quantize(QuantizeRequest(source="~nobody/x", bits=3, name="new")))
    assert reports[-1] == Progress(phase="done", done=1, total=1, unit="", message="new")
    reports = await collect(client.pull(PullRequest(name="a/b")))
    assert reports[-1].message == "/cache/a/b/None"


async def test_a_relative_folder_is_sent_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["source"])
        return httpx.Response(200, text=f"data: {json.dumps(to_json(Quantized(model=entry('m'))))}\n\n")

    for source in ("folder", "org/name"):
        await collect(scripted(answer).quantize(QuantizeRequest(source=source)))
    assert sent == [str(tmp_path / "folder"), "org/name"]


@pytest.mark.parametrize(
    ("text", "model", "kind"),
    [
        ("echo " + "x " * CONTEXT, "small", ContextLengthError),
        ("echo a", "nowhere", NotFoundError),
        ("echo a", "broken", UnavailableError),
        ("break now", "small", AnswerError),
        ("echo a BREAK", "small", AnswerError),
    ],
)
async def test_refusals_are_errors_of_the_tree(
    client: RuntimeClient, text: str, model: str, kind: type[AnswerError]
) -> None:
    with pytest.raises(kind) as failure:
        await collect(client.chat([{"role": "user", "content": text}], ChatOptions(model=model)))
    assert type(failure.value) is kind
    assert str(failure.value)


async def test_a_refused_option_names_itself(client: RuntimeClient) -> None:
    with pytest.raises(RequestRefusedError) as failure:
        await collect(client.chat(HELLO, ChatOptions(model="small", temperature=9)))
    assert (failure.value.param, failure.value.status) == ("temperature", 400)


async def test_failed_loads_and_busy_workshops(client: RuntimeClient) -> None:
    with pytest.raises(UnavailableError, match="quantize the model again"):
        await collect(client.load(LoadRequest(model="broken")))
    with pytest.raises(NotFoundError):
        await collect(client.load(LoadRequest(model="nowhere")))
    async with aclosing(client.pull(PullRequest(name="slow"))) as reports:
        await anext(reports)
        with pytest.raises(BusyError):
            await collect(client.quantize(QuantizeRequest(source="x")))


async def test_a_wrong_token() -> None:
    service, _ = make_service()
    app = create_app(service, Security(token="right", management_token="right"))
    client = RuntimeClient("http://127.0.0.1:1", "wrong", transport=httpx.ASGITransport(app))
    with pytest.raises(AccessError):
        await client.status()
    assert service.close()


async def test_nobody_listens() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    client = RuntimeClient(f"http://127.0.0.1:{port}", "t")
    with pytest.raises(ConnectionLostError, match="can't be reached"):
        await client.status()
    with pytest.raises(ConnectionLostError):
        await collect(client.chat(HELLO, ChatOptions(model="m")))
    await client.aclose()
    await client.aclose()


CHUNK = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": null}]}\n\n'


@pytest.mark.parametrize("end", ["", "data: [DONE]\n\n"])
async def test_an_answer_that_breaks_off_is_an_error(end: str) -> None:
    client = scripted(lambda _request: httpx.Response(200, text=": ping\n\n" + CHUNK + end))
    seen = []

    async def read() -> None:
        async for delta in client.chat(HELLO, ChatOptions(model="m")):
            seen.append(delta.text)  # noqa: PERF401 -- a comprehension would lose them with the error

    with pytest.raises(ConnectionLostError, match="cut off"):
        await read()
    assert seen == ["half"]


async def test_work_that_breaks_off_is_an_error() -> None:
    report = {"phase": "load", "done": 0, "total": None, "unit": "", "message": ""}
    client = scripted(lambda _request: httpx.Response(200, text=f"data: {json.dumps(report)}\n\n"))
    with pytest.raises(ConnectionLostError, match="cut off"):
        await collect(client.load(LoadRequest(model="m")))


NONSENSE = [
    *(("chat", text) for text in ("data: nonsense", "data: []", 'data: {"choices": 3}', 'data: {"choices": [3]}')),
    ("chat", "data: {}"),
    *(("device", text) for text in ("{}", '{"problems": [{}]}', '{"problems": [], "tuning": {}}')),
    ("device", '{"problems": [], "tuning": {"curve": [{"points": [3]}]}}'),
    *(("status", text) for text in ("", "<html>", "[]", "{}")),
]


@pytest.mark.parametrize(("asked", "text"), NONSENSE)
async def test_answers_that_make_no_sense(asked: str, text: str) -> None:
    ends = "\n\n" if asked == "chat" else ""
    client = scripted(lambda _request: httpx.Response(200, text=text + ends))
    answer = collect(client.chat(HELLO, ChatOptions(model="m"))) if asked == "chat" else getattr(client, asked)()
    with pytest.raises(ProtocolError):
        await answer
    if asked == "status":
        with pytest.raises(AnswerError, match="status 502"):
            await scripted(lambda _request: httpx.Response(502, text=text)).status()


async def test_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    client = RuntimeClient("http://127.0.0.1:1", "t")
    assert client._http._mounts == {}
    await client.aclose()


async def test_the_tokens_of_an_answer(client: RuntimeClient) -> None:
    asked = InspectRequest(model="small", messages=[InspectedMessage(role="user", content="hi")], answer="one two")
    report, told = await collect(client.inspect(asked))
    assert isinstance(report, Progress)
    assert isinstance(told, Inspection)
    assert [token.text for token in told.tokens] == ["one", "two"]
