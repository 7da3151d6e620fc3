"""The check of the graphics card, and the messages where it cannot be used."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.cli import doctor as checks
from models.recipe import Recipe
from runtime.backends import ModelSizes, backend
from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton import buffers, gpu, products
from runtime.backends.triton import card as measured
from runtime.backends.triton.buffers import Value
from runtime.backends.triton.decoder import TritonDecoder
from runtime.errors import BackendError, OutOfMemoryError, RequestError
from runtime.load import plan as opening
from runtime.load.plan import LoadOptions, LoadPlan, plan_load
from tests.runtime.conftest import STREAMS, make_model, make_spec
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


def failing(error: BaseException) -> Callable[..., Any]:
    """Whatever it is called with."""

    def fail(*_given: object, **_options: object) -> Any:
        raise error

    return fail


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Shows the program these cards, whatever is in this machine."""

    def install(
        *found: GpuInfo,
        missing: tuple[str | None, str | None] = (None, None),
        uuid: str | None = None,
        launch: Callable[[], object] = lambda: None,
    ) -> None:
        monkeypatch.setattr(gpu, "detect_gpus", lambda: found)
        monkeypatch.setattr(gpu, "_missing", lambda driver: missing)
        monkeypatch.setattr(gpu, "_first_uuid", lambda: uuid)
        monkeypatch.setattr(gpu, "launch_once", functools.cache(launch))
        monkeypatch.setattr(torch.cuda, "mem_get_info", failing(RuntimeError("a card that is not there")))

    return install


def test_a_card_that_can_be_used(cards: Callable[..., None]) -> None:
    cards(CARD)
    found = gpu.probe()
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
    """And nothing is launched on it."""
    cards(*([] if card is None else [card]), missing=missing, launch=failing(AssertionError()))
    found = gpu.probe()
    assert not gpu.is_started()
    assert not found.usable
    assert words in found.reason
    assert found.memory is None
    chosen = next(opening.candidates())
    assert chosen.backend.name == "cpu"
    assert words in chosen.reason
    with pytest.raises(BackendError, match=words):
        next(opening.candidates("triton"))


def test_a_model_that_the_card_does_not_hold_runs_on_the_cpu(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(CARD)
    monkeypatch.setattr(backend("triton"), "open", failing(OutOfMemoryError("3 GiB are free")))
    options = DecoderOptions(context=64, max_rows=4, threads=1)
    decoder, reason = opening.open_decoder(make_model(), options)
    assert decoder.backend == "cpu"
    assert "3 GiB are free" in reason
    with pytest.raises(OutOfMemoryError):
        opening.open_decoder(make_model(), options, "triton")


def test_what_has_no_kernels_on_a_card_runs_on_the_cpu(cards: Callable[..., None]) -> None:
    cards(CARD)
    model, options = make_model(make_spec(**STREAMS)), DecoderOptions(context=64, max_rows=4, threads=1)
    sizes = ModelSizes(weight_bytes=0, recipe=Recipe(method="rtn"))
    for name in ("triton", "shared"):
        with pytest.raises(BackendError, match="no GPU kernels for the streams"):
            backend(name).footprint(model.spec, sizes, compensated=False)
    decoder, reason = opening.open_decoder(model, options)
    assert decoder.backend == "cpu"
    assert "the GPU backend cannot run this model (there are no GPU kernels for the streams" in reason


def test_what_does_not_fit_the_card_is_planned_for_main_memory(cards: Callable[..., None]) -> None:
    cards(CARD)
    room = MemoryInfo(total_bytes=64 << 30, available_bytes=48 << 30, limit_bytes=None)

    def planned(size: int, asked: str = "auto", layers: int | None = None) -> LoadPlan:
        info = SimpleNamespace(summary=SimpleNamespace(gpu_bytes=size << 30, residual_bytes=1 << 30))
        model: Any = SimpleNamespace(spec=make_spec(), info=info, recipe=None, path=Path(), mtp=None)
        return plan_load(model, LoadOptions(backend=asked, layers_on_device=layers), memory=room)

    small, large = planned(1), planned(5)
    assert (small.backend_name, small.backend.name, small.memory.available_bytes) == ("auto", "triton", 5 << 30)
    assert (large.backend_name, large.backend.name, large.memory.available_bytes) == ("shared", "shared", 5 << 30)
    assert large.memory.rest is not None
    assert (large.options.layers_on_device, large.memory.rest.available_bytes) == (1, 48 << 30)
    huge = planned(14)
    assert (huge.backend_name, huge.backend.name, huge.memory.available_bytes) == ("cpu", "cpu", 48 << 30)
    with pytest.raises(OutOfMemoryError):
        planned(5, "triton")
    with pytest.raises(OutOfMemoryError):
        planned(50)
    assert [planned(1, layers=blocks).backend_name for blocks in (0, 1, 2)] == ["cpu", "shared", "triton"]
    with pytest.raises(RequestError, match="3 blocks on the GPU were requested, and the model has 2: choose 0 to 2"):
        planned(1, layers=3)
    with pytest.raises(RequestError, match="leave one of them at auto"):
        planned(1, "cpu", layers=1)
    cards()
    assert planned(1, layers=1).backend_name == "cpu", "there is no card"


def test_a_card_that_is_gone(cards: Callable[..., None]) -> None:
    cards()
    with pytest.raises(BackendError, match="no longer responds"):
        backend("triton").device(DecoderOptions())


def test_link_and_memory_are_measured_where_there_is_a_card(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A link that cannot be measured is unknown; memory that cannot is an error."""
    gpu.link_gb_s.cache_clear()
    cards()
    assert (gpu.link_gb_s(), gpu.memory_gb_s()) == (None, None)
    assert measured.host_to_device_gb_s("cpu", nbytes=1 << 20) > 0
    assert measured.device_read_gb_s("cpu", nbytes=1 << 20) > 0
    cards(CARD)
    refuse = failing(RuntimeError("none is free"))
    for measure, found in ((lambda: 12.5, 12.5), (refuse, None)):
        gpu.link_gb_s.cache_clear()
        monkeypatch.setattr(measured, "host_to_device_gb_s", measure)
        assert gpu.link_gb_s() == found
    assert "could not be measured: none is free" in caplog.text
    gpu.link_gb_s.cache_clear()
    monkeypatch.setattr(measured, "device_read_gb_s", lambda: 192.0)
    assert gpu.memory_gb_s() == 192.0
    monkeypatch.setattr(measured, "device_read_gb_s", refuse)
    with pytest.raises(BackendError, match="the card's memory could not be measured: none is free"):
        gpu.memory_gb_s()


def test_cards_are_matched_by_their_names(cards: Callable[..., None]) -> None:
    """NVML has the old card first, CUDA the one that runs the kernels."""
    old = dataclasses.replace(CARD, name="Quadro P400", compute_capability="6.1", uuid="GPU-1")
    new = dataclasses.replace(CARD, uuid="GPU-2", memory_free_bytes=3 << 30)
    cards(old, new, uuid="GPU-2")
    found = gpu.probe()
    assert (found.usable, found.gpu) == (True, new)
    cards(new, old, uuid="GPU-1")
    found = gpu.probe()
    assert (found.usable, found.gpu) == (False, old)
    assert "CUDA_VISIBLE_DEVICES" in (found.fix or "")
    cards(new, old, uuid="MIG-3")
    assert gpu.probe().gpu == new


class OutOfResources(Exception):
    """As Triton's."""

    def __init__(self) -> None:
        super().__init__("out of resource")
        self.required, self.limit, self.name = 120000, 101376, "shared memory"


FAILURES: dict[str, tuple[BaseException, str, str]] = {
    "no-compiler": (RuntimeError("Failed to find C compiler. Please specify via CC"), "no C compiler", "apt install"),
    "CC-is-missing": (FileNotFoundError(2, "No such file", "clang-99"), "clang-99", "variable CC"),
    "no-headers": (subprocess.CalledProcessError(1, ["gcc", "main.c"]), "Python.h is missing", "-dev"),
    "old-driver": (RuntimeError("The NVIDIA driver on your system is too old (found 12040)"), "too old", "update it"),
    "old-driver-for-ptx": (
        RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain."),
        "too old",
        "update it",
    ),
    "no-driver": (RuntimeError("0 active drivers ([]). There should only be one."), "no driver", "install NVIDIA's"),
    "no-library": (AssertionError("libcuda.so cannot found!"), "libcuda.so.1", "ldconfig"),
    "resources": (OutOfResources(), "more shared memory than the card has (120000", "CPU backend"),
    "memory": (RuntimeError("CUDA error: out of memory"), "memory is taken", "nvidia-smi"),
    "no-image": (RuntimeError("CUDA error: no kernel image is available"), "no code for the card", "newer build"),
    "cache-folder": (PermissionError(13, "Permission denied", "/root/.triton"), "its folder", "TRITON_CACHE_DIR"),
    "no-execution": (ImportError("launcher.so: failed to map segment"), "its folder", "TRITON_CACHE_DIR"),
    "assembler": (RuntimeError("PTXAS error: Internal Triton PTX codegen error"), "assembler", "reinstall triton"),
    "unknown": (RuntimeError("CUDA error: an illegal instruction\nmore"), "an illegal instruction)", "nvidia-smi"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_card_that_runs_no_kernel_is_out_and_it_is_said_why(
    cards: Callable[..., None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found when the backend is probed; the CPU takes the model, and doctor would name the reason and the fix."""
    error, reason, fix = FAILURES[case]
    launch = gpu.launch_once.__wrapped__
    monkeypatch.setattr("runtime.backends.triton.card.launch", failing(error))
    monkeypatch.setattr(gpu, "sysconfig", SimpleNamespace(get_paths=lambda: {"include": "/nowhere"}))
    cards(CARD, launch=launch)
    found = backend("triton").probe()
    assert not found.usable
    assert found.gpu == CARD
    assert reason in found.reason
    assert fix in (found.fix or "")
    assert "\n" not in found.reason
    decoder, why = opening.open_decoder(make_model(), DecoderOptions(context=64, max_rows=4, threads=1))
    assert decoder.backend == "cpu"
    assert reason in why
    decoder.close()
    with pytest.raises(BackendError, match="cannot run here"):
        next(opening.candidates("triton"))
    (problem,) = checks.choose({"triton": found, "cpu": backend("cpu").probe()})[1]
    assert reason in problem.what
    assert fix in problem.fix


def test_a_compiler_that_fails_for_another_reason_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(gpu, "sysconfig", SimpleNamespace(get_paths=lambda: {"include": str(tmp_path)}))
    found = gpu.explained(subprocess.CalledProcessError(1, ["gcc", "main.c", "-lcuda"]))
    assert "gcc main.c -lcuda" in str(found)


def test_the_launch_is_tried_until_it_succeeds_and_then_never_again(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[bool | Exception] = [RuntimeError("Failed to find C compiler"), False, True]

    def launch(device: object) -> bool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("runtime.backends.triton.card.launch", launch)
    cards(CARD, launch=gpu.launch_once.__wrapped__)
    assert [gpu.probe().usable for _ in range(4)] == [False, False, True, True]
    assert not outcomes
    assert gpu.is_started()


def test_torch_that_finds_no_device_names_the_driver_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reason, fix = gpu._missing("570.86")
    assert "CUDA 13.0" in (reason or "")
    assert "needs 580 or newer" in (fix or "")
    assert "570.86" in (fix or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides every card" in (gpu._missing("580.1")[0] or "")
    assert gpu.least_driver("14.1") == "a newer one"


def test_the_trial_launch_counts_its_programs(device: str) -> None:
    assert gpu.probe().reason, "the cards of this machine can be looked at"
    assert measured.launch(device)


def refuse(device: object, *, cooperative: bool = False) -> bool:
    """A card whose driver allows no cooperative launch."""
    if cooperative:
        raise RuntimeError("Triton Error [CUDA]: operation not supported\nmore")
    return True


def test_a_card_that_refuses_cooperative_launches_can_be_used(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "launch", refuse)
    cards(CARD, launch=gpu.launch_once.__wrapped__)
    assert gpu.probe().usable
    buffers.refused_cooperation.cache_clear()
    said = buffers.refused_cooperation(torch.device("cuda"))
    assert said == "RuntimeError: Triton Error [CUDA]: operation not supported"
    buffers.refused_cooperation.cache_clear()


@pytest.mark.parametrize("refused", [None, "operation not supported"])
def test_compensation_then_takes_two_launches(
    device: str, monkeypatch: pytest.MonkeyPatch, refused: str | None
) -> None:
    """Which give the same bits (test_compensate_triton.py), and the user is told."""
    options = DecoderOptions(context=8, max_rows=1, k_chunk=64)
    decoder = TritonDecoder(make_model(make_spec(), bits=4), options, device)
    decoder.buffers.alone = refused
    found: list[bool] = []
    monkeypatch.setattr(products, "compensate", lambda *operands, **_: found.append(operands[4].fused))
    linear = next(iter(decoder.model.linears.values()))
    N, K = linear.packed.shape
    buffers = decoder.buffers
    x, out, dec = Value(buffers.input(1, K)), buffers.output(1, N), buffers.compensation(1, N)
    products.compensated_product(linear, x, buffers.positions[:1], out, dec, buffers, None)
    assert found == [refused is None]
    monkeypatch.setattr(decoder, "_on_gpu", True)
    assert [refused in problem.what for problem in decoder.problems if refused] == [True] * bool(refused)
    assert bool(decoder.problems) == bool(refused)


@pytest.mark.parametrize(("mode", "used"), [(None, "kernels/triton"), (0o700, "named"), (0o777, None)])
def test_what_triton_compiles_is_kept_where_only_this_user_can_write(
    mode: int | None, used: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded unread, and Triton's own folder is as open as the umask makes it."""
    from triton import knobs

    from runtime.backends.triton.card import launch

    monkeypatch.setenv("LOWBIT_CHAT_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)  # an earlier launch sets it
    if mode is not None:
        (tmp_path / "named").mkdir()
        (tmp_path / "named").chmod(mode)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "named"))
    with knobs.cache.scope():
        knobs.cache.reset()
        with contextlib.suppress(RuntimeError, AssertionError):  # there may be no card
            launch("cuda")
        found = Path(knobs.cache.dir)
    assert found == tmp_path / used if used else not found.is_relative_to(tmp_path)


def test_a_started_driver_is_not_planned_for_twice(cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """But what it will keep for kernels is: 1 KiB for each thread that the card can hold."""
    sizes = ModelSizes(weight_bytes=1 << 20)

    def overhead() -> int:
        return backend("triton").footprint(make_spec(), sizes, compensated=False).overhead_bytes

    cards(CARD)
    before = overhead()
    gpu.launch_once()
    card = SimpleNamespace(multi_processor_count=20, max_threads_per_multi_processor=1536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert before - overhead() == (256 << 20) - (30 << 20)


def test_a_card_that_stopped_working_is_out_until_the_program_is_restarted(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """And closing what was on it is no error."""
    decoder = TritonDecoder(make_model(make_spec(), bits=4), DecoderOptions(context=8, max_rows=1), device)
    cards(CARD)
    gpu.launch_once()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", failing(RuntimeError("CUDA error: launch failure\nmore")))
    decoder.close()
    found = backend("triton").probe()
    assert not found.usable
    assert "launch failure)" in found.reason
    assert found.fix == "restart the program"
