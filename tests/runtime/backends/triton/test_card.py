"""Whether a GPU can be used, and what is said where it can't."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import open as opening
from runtime.backends import backend
from runtime.backends.triton import card as gpu
from runtime.backends.triton import link
from runtime.compensation import Compensation
from runtime.decoder import DecoderOptions
from runtime.errors import BackendError, OutOfMemoryError
from runtime.loading import LoadPlan, plan_load
from tuner.detect import MemoryInfo
from tuner.gpu import GpuInfo, PcieLink

CARD = GpuInfo(
    name="NVIDIA GeForce RTX 4050 Laptop GPU",
    vendor="nvidia",
    memory_total_bytes=6 << 30,
    memory_free_bytes=5 << 30,
    compute_capability="8.9",
    driver="580.65",
    pcie=PcieLink(generation=4, lanes=8, gb_s=15.8),
)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*found: GpuInfo, missing: tuple[str | None, str | None] = (None, None)) -> None:
        monkeypatch.setattr(gpu, "detect_gpus", lambda: found)
        monkeypatch.setattr(gpu, "_missing", lambda: missing)

    return install


def test_a_card_that_can_be_used(cards: Callable[..., None]) -> None:
    cards(CARD)
    found = gpu.look()
    assert found.usable
    assert "RTX 4050" in found.reason
    assert found.memory is not None
    assert found.memory.available_bytes == 5 << 30
    chosen = next(opening.candidates())
    assert (chosen.backend.name, chosen.presence.memory) == ("triton", found.memory)
    assert "RTX 4050" in chosen.reason


@pytest.mark.parametrize(
    ("card", "missing", "words"),
    [
        (None, (None, None), "no NVIDIA card"),
        (dataclasses.replace(CARD, vendor="amd"), (None, None), "no NVIDIA card"),
        (dataclasses.replace(CARD, driver=None), (None, None), "no driver answers"),
        (dataclasses.replace(CARD, compute_capability="7.5"), (None, None), "compute capability 7.5"),
        (CARD, ("torch was built without CUDA", "install a CUDA build of torch"), "without CUDA"),
    ],
)
def test_why_a_card_cannot_be_used(cards: Callable[..., None], card: Any, missing: Any, words: str) -> None:
    cards(*([] if card is None else [card]), missing=missing)
    found = gpu.look()
    assert not found.usable
    assert words in found.reason
    assert found.memory is None
    chosen = next(opening.candidates())
    assert chosen.backend.name == "cpu"
    assert words in chosen.reason
    with pytest.raises(BackendError, match=words):
        next(opening.candidates("triton"))


def test_a_model_that_the_card_does_not_hold_runs_on_the_cpu(
    cards: Callable[..., None], tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: object, options: object) -> None:
        raise OutOfMemoryError("3 GiB are free")

    cards(CARD)
    monkeypatch.setattr(backend("triton"), "open", full)
    options = DecoderOptions(context=64, max_rows=4, threads=1)
    decoder, reason = opening.open_decoder(tiny_model(), options)
    assert decoder.backend == "cpu"
    assert "3 GiB are free" in reason
    with pytest.raises(OutOfMemoryError):
        opening.open_decoder(tiny_model(), options, "triton")


def test_what_does_not_fit_the_card_is_planned_for_main_memory(
    cards: Callable[..., None], tiny_spec: Callable[..., Any]
) -> None:
    cards(CARD)
    room = MemoryInfo(total_bytes=64 << 30, available_bytes=48 << 30, limit_bytes=None)

    def planned(size: int, asked: str = "auto") -> LoadPlan:
        summary = SimpleNamespace(gpu_bytes=size << 30, residual_bytes=1 << 30)
        model: Any = SimpleNamespace(spec=tiny_spec(), info=SimpleNamespace(summary=summary))
        return plan_load(model, Compensation(), asked=asked, memory=room)

    small, large = planned(1), planned(5)
    assert (small.asked, small.backend.name, small.memory.available_bytes) == ("auto", "triton", 5 << 30)
    assert (large.asked, large.backend.name, large.memory.available_bytes) == ("cpu", "cpu", 48 << 30)
    with pytest.raises(OutOfMemoryError):
        planned(5, "triton")
    with pytest.raises(OutOfMemoryError):
        planned(50)


def test_a_card_that_is_gone(cards: Callable[..., None]) -> None:
    cards()
    with pytest.raises(BackendError, match="does not answer any more"):
        backend("triton").device(DecoderOptions())


def test_the_link_is_measured_where_there_is_a_card(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> float:
        raise RuntimeError("no page-locked memory")

    gpu.link_gb_s.cache_clear()
    cards()
    assert gpu.link_gb_s() is None
    assert link.host_to_device_gb_s("cpu", nbytes=1 << 20) > 0
    cards(CARD)
    for measure, found in ((lambda: 12.5, 12.5), (refuse, None)):
        gpu.link_gb_s.cache_clear()
        monkeypatch.setattr(link, "host_to_device_gb_s", measure)
        assert gpu.link_gb_s() == found
    assert "could not be measured: no page-locked memory" in caplog.text
    gpu.link_gb_s.cache_clear()


def test_the_cards_of_this_machine_can_be_looked_at() -> None:
    assert gpu.look().reason
