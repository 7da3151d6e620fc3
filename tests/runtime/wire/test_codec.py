"""Records as JSON and back, and errors for malformed JSON."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from models.progress import Progress
from runtime.errors import Problem
from runtime.wire import answers, codec, device, requests
from runtime.wire.answers import Caches, ErrorRecord, ModelEntry, Status
from runtime.wire.codec import WireError, from_json, to_json
from runtime.wire.device import DeviceReport, Tuning
from runtime.wire.requests import InspectRequest, LoadRequest, PullRequest, QuantizeRequest, TuneRequest
from tuner.curve import Curve

TUNING = Tuning(
    device="x", budget_percent=5, n_tb_max=None, n_tb={}, k_chunk={"qkv": 8}, predicted_slowdown_percent=4.5,
    measured_slowdown_percent=4, seconds=1, date="", cached=True,
    curve=(Curve(kind="qkv", n_tb=0, points=((0, 1.0), (8, 1.25))),),
)  # fmt: skip
RECORDS = [
    LoadRequest(model="m", kv="int4", k_chunk={"qkv": 8, "head": 0}, context=64, backend="cpu"),
    LoadRequest(model="m", budget=2.5),
    TuneRequest(k_chunk=4, force=True),
    QuantizeRequest(source="x", bits=3.5, method="awq-gptq", name="n"),
    PullRequest(name="a/b"),
    Status(state="failed", error=ErrorRecord(message="m", type="t")),
    DeviceReport(
        machine={"cpu": {"cores": [1, 2]}, "gpu": None}, tuning=TUNING, problems=(Problem(what="a", fix="b"),)
    ),
    Caches(files=1, bytes=2, kinds={"int4": answers.CacheFacts(bytes_per_token=1.5, context=3)}),
    Progress(phase="load", done=1, total=None, unit="", message="half"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_the_wire(record: Any) -> None:
    sent = json.dumps(to_json(record), allow_nan=False)
    assert from_json(type(record), json.loads(sent), strict=True) == record


def test_what_is_written_is_plain() -> None:
    status = Status(state="ready", k_chunk=MappingProxyType({"qkv": 8}))
    assert type(to_json(status)["k_chunk"]) is dict
    assert to_json(TUNING)["curve"] == [{"kind": "qkv", "n_tb": 0, "points": [[0, 1.0], [8, 1.25]]}]


@pytest.mark.parametrize("module", [answers, device, requests], ids=lambda module: module.__name__)
def test_every_field_can_be_read(module: ModuleType) -> None:
    """An annotation that the codec does not know would be met only by whoever asks for that record."""
    kinds = [kind for _, kind in inspect.getmembers(module, is_dataclass) if kind.__module__ == module.__name__]
    assert kinds
    for kind in kinds:
        for annotation in codec._fields(kind)[0].values():
            for value in (object(), {"": object()}, [object()]):
                with contextlib.suppress(WireError):  # it is read as far as it goes
                    codec._read(annotation, value, "", strict=True)


def test_an_annotation_that_cannot_be_read_is_met() -> None:
    with pytest.raises(AssertionError, match="cannot be read"):
        codec._read(bytes, b"", "", strict=True)


def test_an_unknown_field_is_left_out_or_refused() -> None:
    body = {"name": "a/b", "mode": 1}
    assert from_json(PullRequest, body) == PullRequest(name="a/b")
    with pytest.raises(WireError, match="mode is unknown; known are: name, revision") as failure:
        from_json(PullRequest, body, strict=True)
    assert failure.value.field == "mode"


@pytest.mark.parametrize(
    ("kind", "body", "field", "words"),
    [
        (LoadRequest, {}, "model", "model is missing"),
        (ModelEntry, {"name": "m"}, "bits", "bits, bits_per_weight, .* are missing"),
        (LoadRequest, [], "", "it must be an object, not "),
        (LoadRequest, {"model": 3}, "model", "model must be a text, not 3"),
        (LoadRequest, {"model": ""}, "model", "a text of 1 to 300 characters, not ''"),
        (LoadRequest, {"model": "m", "kv": "int3"}, "kv", "kv must be one of fp16, int8, .* or null, not 'int3'"),
        (LoadRequest, {"model": "m", "k_chunk": 1025}, "k_chunk", "a whole number of 0 to 1024 or an object or null"),
        (LoadRequest, {"model": "m", "k_chunk": True}, "k_chunk", "not True"),
        (LoadRequest, {"model": "m", "k_chunk": {"qkv": -1}}, "k_chunk.qkv", "k_chunk.qkv must be"),
        (LoadRequest, {"model": "m", "k_chunk": {"x" * 10**6: 1}}, f"k_chunk.{'x' * 59}…", "one of qkv, o"),
        (LoadRequest, {"model": "m", "k_chunk": {"nose": 1}}, "k_chunk.nose", "one of qkv, o, gate_up, down, head"),
        (LoadRequest, {"model": "m", "k_chunk": {"layers.x.o": 1}}, "k_chunk.layers.x.o", r"such as layers\.3\.down"),
        (LoadRequest, {"model": "m", "context": 0}, "context", "context must be a whole number of 1 or more or null"),
        (LoadRequest, {"model": "m", "context": 2**63}, "context", "not 9223372036854775808"),
        (LoadRequest, {"model": "m", "k_chunk": [0] * 10**6}, "k_chunk", r"not \[0, 0, "),
        (InspectRequest, {"model": "m", "answer": "a", "messages": [0] * 20_000}, "messages", "of 0 to 16384 items"),
        (LoadRequest, {"model": "m", "budget": "5"}, "budget", "a number of 0 to 100 or exact or null, not '5'"),
        (LoadRequest, {"model": "m", "budget": float("nan")}, "budget", "not nan"),
        (LoadRequest, {"model": "m", "budget": 10**400}, "budget", "not 1000"),
        (TuneRequest, {"force": 1}, "force", "force must be true or false, not 1"),
        (Status, {"state": "asleep"}, "state", "state must be one of empty"),
        (Status, {"state": ["ready"]}, "state", "state must be one of empty"),
        (Status, {"state": "failed", "error": {"type": "t"}}, "error.message", "error.message is missing"),
        (DeviceReport, {"machine": {}, "problems": {}}, "problems", "problems must be a list, not {}"),
        (DeviceReport, {"machine": {}, "problems": [{"what": "a"}]}, "problems[0].fix", "is missing"),
        (Curve, {"kind": "o", "n_tb": 0, "points": [[3]]}, "points[0]", "must be a list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(kind: type, body: Any, field: str, words: str) -> None:
    with pytest.raises(WireError, match=words) as failure:
        from_json(kind, body)
    assert failure.value.field == field
    assert failure.value.missing == ("missing" in words)
    assert len(str(failure.value)) < 300


def test_the_ends_of_a_range_belong_to_it() -> None:
    for body in ({"k_chunk": 0, "budget": None, "context": 1}, {"k_chunk": 1024}, {"budget": 0}, {"budget": 100}):
        assert from_json(LoadRequest, {"model": "m" * 300, **body}).model == "m" * 300


def test_numbers_are_read_as_what_they_are() -> None:
    """A budget of 5 and one of 5.0 are the same profile."""
    read = from_json(LoadRequest, {"model": "m", "budget": 5, "k_chunk": {"qkv": 1}})
    assert (type(read.budget), isinstance(read.k_chunk, Mapping)) == (float, True)
