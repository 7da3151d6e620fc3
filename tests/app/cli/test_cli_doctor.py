from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import doctor as checks
from app.cli.services import Services
from runtime.backends import Presence
from runtime.budget import tuning
from runtime.budget.clocks import Clocks
from runtime.server.lock import LockRecord, lock_path, write_lock
from runtime.system.lifetimes import process_create_time
from tuner.detect import CpuInfo, Machine, MemoryInfo
from tuner.gpu import GpuInfo, PcieLink

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
GIB = 1 << 30
MACHINE = Machine(
    cpu=CpuInfo(
        name="Some Processor", architecture="x86_64", physical_cores=8, logical_cores=16, usable_cores=4,
        features=("avx2",), caches=(),
    ),
    memory=MemoryInfo(total_bytes=16 * GIB, available_bytes=9 * GIB, limit_bytes=None),
    gpus=(),
)  # fmt: skip
GPU = GpuInfo(
    name="Some Card", vendor="nvidia", memory_total_bytes=6 * GIB, memory_free_bytes=5 * GIB, compute_capability="8.6",
    driver="1.2", pcie=PcieLink(generation=4, lanes=8, gb_s=15.8),
)  # fmt: skip


def gpu_is(services: Any, **presence: Any) -> None:
    """Let the GPU backend be found like this, and the others as they are."""
    found = {**Services().presences(), "triton": Presence(**presence)}
    services.presences = lambda: found


@pytest.fixture
def machine(services: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Replace the machine that the program sees."""

    def replace_machine(machine: Machine) -> None:
        services.machine = lambda: machine
        gpu_is(services, usable=False, reason="no NVIDIA card was found")

    replace_machine(MACHINE)
    monkeypatch.setattr(checks, "_MIN_DISK", 0)
    return replace_machine


def whats(found: dict[str, Any]) -> str:
    assert found["ok"] == (not found["problems"])
    assert all(problem.keys() == {"what", "fix"} and all(problem.values()) for problem in found["problems"])
    return "\n".join(problem["what"] for problem in found["problems"])


def test_a_healthy_machine(answer: Answer, machine: Any, stored: str) -> None:
    found = answer("doctor")
    assert found.keys() == {"ok", "gpu", "cpu", "memory", "pcie", "backend", "reason", "tuning", "problems"}
    assert found["problems"] == []
    assert found["ok"] is True
    assert (found["gpu"], found["pcie"]) == (None, None)
    assert found["cpu"]["usable_cores"] == 4
    assert found["cpu"]["kernels"] in ("amx", "avx512", "avxvnni", "avx2", "generic")
    assert (found["memory"]["available_bytes"], found["memory"]["read_gb_s"]) == (9 * GIB, 10.0)
    assert found["backend"] == "cpu"
    assert found["cpu"]["kernels"] in found["reason"]


def test_for_a_person(run: Run, machine: Any) -> None:
    machine(replace(MACHINE, gpus=(GPU,)))
    text = run("doctor").stdout
    assert "Some Processor, 4 of 8 cores" in text
    assert "Some Card, 6.4 GB, PCIe 4 x8, 15.8 GB/s at most" in text
    assert "the card reads main memory at 12.2 GB/s, measured" in text
    assert "torch 2" in text


def test_a_card_that_torch_cannot_use(answer: Answer, machine: Any, services: Any) -> None:
    machine(replace(MACHINE, gpus=(GPU,)))
    gpu_is(services, usable=False, reason="torch was built without CUDA", fix="install it", gpu=GPU)
    found = answer("doctor")
    assert "built without CUDA" in whats(found)
    assert (found["gpu"]["name"], found["pcie"]["lanes"]) == ("Some Card", 8)
    assert found["pcie"]["measured_gb_s"] == 12.25
    assert found["backend"] == "cpu"


def test_a_card_that_can_be_used_comes_first(answer: Answer, run: Run, machine: Any, services: Any) -> None:
    """However the driver numbers the cards."""
    others, used = replace(GPU, uuid="GPU-1", name="Other Card"), replace(GPU, uuid="GPU-2", name="Used Card")
    machine(replace(MACHINE, gpus=(others, used)))
    gpu_is(services, usable=True, reason="Used Card was found", gpu=used)
    found = answer("doctor")
    assert found["ok"]
    assert (found["backend"], found["gpu"]["name"]) == ("triton", "Used Card")
    assert "Used Card was found" in found["reason"]
    text = run("doctor").stdout
    assert text.index("Used Card") < text.index("Other Card")


@pytest.mark.parametrize(
    ("pcie", "said"), [(None, "is unknown"), (PcieLink(generation=3, lanes=1, gb_s=1.0), "1 PCIe lanes")]
)
def test_a_link_that_compensation_suffers_from(
    answer: Answer, machine: Any, services: Any, pcie: PcieLink | None, said: str
) -> None:
    gpu = replace(GPU, pcie=pcie)
    machine(replace(MACHINE, gpus=(gpu,)))
    gpu_is(services, usable=True, reason="Some Card was found", gpu=gpu)
    assert said in whats(answer("doctor"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": "7"}, "not tuned yet for 7 % slowdown"),
        ({"budget": "0"}, "the slowdown budget is 0"),
        ({"budget": "5", "k_chunk": "9"}, "fixed at 9"),
    ],
)
def test_what_is_known_of_tuning(
    answer: Answer, machine: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], said: str
) -> None:
    for key, value in settings.items():
        monkeypatch.setenv(f"LOWBIT_CHAT_{key.upper()}", value)
    found = answer("doctor")["tuning"]
    assert said in found["reason"]
    assert (found["model"], found["k_chunk"]) == ("demo", None)


def test_the_profile_that_is_used(
    answer: Answer, run: Run, machine: Any, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = SimpleNamespace(measured=True, seconds=lambda _kind, _n_tb, k_chunk: 1e-3 * (1 + k_chunk / 1000))
    clock = Clocks(layers=timer, slowdown=lambda *_: 30.0)
    monkeypatch.setattr(tuning, "clocks", lambda *_: clock)
    monkeypatch.setenv("LOWBIT_CHAT_BUDGET", "60")
    services.machine = Services.machine.__get__(services)
    answer("tune-device", "demo", "--budget", 60)
    found = answer("doctor")["tuning"]
    assert found["measured_slowdown_percent"] == 30
    assert found["k_chunk"].keys() == {"qkv", "o", "gate_up", "down", "head"}
    assert "30.0 % slower, 60 % allowed, measured" in run("doctor").stdout
    assert re.search(r"offer     demo: perplexity .* than low bits alone \(low bits", run("doctor").stdout)


def test_little_memory_and_disk(answer: Answer, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(replace(MACHINE, memory=MemoryInfo(total_bytes=GIB, available_bytes=GIB // 2, limit_bytes=None)))
    monkeypatch.setattr(checks, "_MIN_DISK", 1 << 80)
    found = whats(answer("doctor"))
    assert "537 MB of 1.1 GB" in found
    assert "of disk is free" in found


def test_damaged_models(answer: Answer, machine: Any, stored: str, services: Any) -> None:
    folder = services.store().root / stored
    block = folder / "block-00000.safetensors"
    block.chmod(0o600)
    content = bytearray(block.read_bytes())
    content[8] ^= 0xFF  # inside the header, which a quick look reads
    block.write_bytes(content)
    assert "small is damaged" in whats(answer("doctor"))
    (folder / "recipe.json").unlink()
    assert "small is damaged" in whats(answer("doctor"))


def test_a_bad_kernel_choice(services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runtime.backends.cpu.machine.isa", None)
    choice, problems = checks.choose(services.presences())
    assert (choice.backend, choice.variant) == ("reference", None)
    assert len(problems) == 1


def test_a_bad_setting_and_an_open_folder(answer: Answer, machine: Any, isolated_home: Path) -> None:
    (isolated_home / "settings.toml").write_text("temperature = 'warm'\n")
    isolated_home.chmod(0o755)
    found = whats(answer("doctor"))
    assert "temperature" in found
    assert "other users" in found


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "access", lambda *_: False)  # root may write everywhere
    problems = list(checks.check_folders({"cache": tmp_path / "a" / "b"}))
    assert [f"change the permissions of {tmp_path}" in problem.fix for problem in problems] == [True]


@pytest.mark.parametrize("content", ["{", None], ids=["damaged", "dead"])
def test_a_lock_file_that_was_left(answer: Answer, machine: Any, isolated_home: Path, content: str | None) -> None:
    record = {"pid": 2**22 - 1, "create_time": 1.0, "host": "127.0.0.1", "port": 1, "token": "t", "version": "0"}
    lock = isolated_home / "runtime.json"
    lock.write_text(content or json.dumps(record))
    lock.chmod(0o600)
    assert "runtime.json" in whats(answer("doctor"))


def test_the_lock_file_of_a_living_runtime(isolated_home: Path, services: Any) -> None:
    created = process_create_time(os.getpid())
    assert created is not None
    record = LockRecord(pid=os.getpid(), create_time=created, host="127.0.0.1", port=1, token="t", version="0")
    write_lock(lock_path(isolated_home), record)
    assert list(checks.check_remains(services.store(), isolated_home)) == []


def test_unfinished_work(services: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = services.store().root / ".work" / "some--thing"
    work.mkdir(parents=True)
    (work / "block").write_bytes(bytes(1000))
    assert list(checks.check_remains(services.store(), tmp_path)) == []
    monkeypatch.setattr(checks, "_LARGE_REMAINS", 1000)
    assert [problem.what for problem in checks.check_remains(services.store(), tmp_path)] == [
        "an unfinished some/thing takes 1 kB"
    ]


def test_missing_packages() -> None:
    found = checks.versions()
    assert all(found.values())
    assert [problem.what for problem in checks.check_packages({**found, "numba": None})] == [
        "the package numba is not installed"
    ]
    assert checks.check_packages({**found, "torch": None, "transformers": None, "triton": None}) == []


def test_torch_is_asked_without_importing_it() -> None:
    code = "import sys; from app.cli.doctor import versions; versions(); print(*sys.modules)"
    root = Path(__file__).parents[3]
    loaded = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True, text=True).stdout
    assert "torch" not in loaded.split()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}, "127.0.0.1:9 does not answer"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    ],
)
def test_the_hub_is_asked_only_if_asked_to(
    answer: Answer, machine: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert answer("doctor")["ok"]
    assert said in whats(answer("doctor", "--hub"))
