"""The slowdown budget on the command line: tune-device, and --budget of the other verbs."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli import run as running
from app.cli import start
from models.store.certificate import Certificate
from runtime.backends.cpu.backend import CpuBackend
from runtime.budget import clocks as clocking
from runtime.budget import spending, tuning
from runtime.compensation import Compensation
from runtime.errors import BackendError
from tuner.errors import TimerError

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
Error = Callable[..., str]
KINDS = ("qkv", "o", "gate_up", "down", "head")
FIELDS = {
    "device", "budget_percent", "n_tb_max", "n_tb", "k_chunk", "predicted_slowdown_percent",
    "measured_slowdown_percent", "seconds", "cached", "prompts", "offer", "certificate",
}  # fmt: skip
SIMULATED = ("--simulate", "rtx-4050m", "--shape", "llama-3-8b", "--bits", 3, "--method", "awq")


class Clock:
    """A processor on which compensation costs the same everywhere: a percent for every 16 channels per 1024."""

    measured = True

    def __init__(self) -> None:
        self.readings = 0

    def seconds(self, _kind: str, _n_tb: int, k_chunk: int) -> float:
        self.readings += 1
        return 1e-3 * (1 + k_chunk / 1600)

    def slowdown(self, k_chunk: Any, _n_tb: Any = None) -> float:
        counts = {kind: 1 if kind == "head" else 2 for kind in KINDS}
        return sum(counts[kind] * k_chunk[kind] / 16 for kind in KINDS) / sum(counts.values())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    found = clocking.Clocks(layers=clock, slowdown=clock.slowdown)
    monkeypatch.setattr(tuning, "clocks", lambda _decoder, _cancelled: found)
    return clock


def test_the_json_object_has_exactly_the_documented_fields(answer: Answer, clock: Clock) -> None:
    found = answer("tune-device", "demo", "--budget", 8)
    assert found.keys() == FIELDS | {"measured"}
    assert found["prompts"]["budget_percent"] == 20
    assert found["prompts"]["k_chunk"] in (0, *CpuBackend.prompt_levels)
    offer = found["offer"]
    assert offer["words"] in [way["words"] for way in offer["ways"]]
    assert {way["target"] for way in offer["ways"]} == {"plain", "compensated", "residual"}
    assert (found["budget_percent"], found["n_tb_max"], found["cached"]) == (8, None, False)
    assert found["n_tb"] == dict.fromkeys(KINDS, 0)
    assert set(found["k_chunk"]) == set(KINDS)
    assert max(found["k_chunk"].values()) > 0
    assert 0 < found["measured_slowdown_percent"] <= 8
    readings = clock.readings
    again = answer("tune-device", "demo", "--budget", 8)
    assert (again["cached"], again["k_chunk"], clock.readings) == (True, found["k_chunk"], readings)
    assert not answer("tune-device", "demo", "--budget", 8, "--force")["cached"]
    assert found["certificate"] is None, "its text was not measured when it was made"


def test_a_budget_is_added_to_the_certificate(
    answer: Answer, run: Run, clock: Clock, checkpoint: Path, services: Any
) -> None:
    run("quantize", checkpoint, "--bits", 3, "--name", "three")
    before = answer("show", "three")["certificate"]["ways"]
    bought = [answer("tune-device", "three", "--budget", budget)["certificate"] for budget in (8, 100, 8)]
    assert bought[1]["kl"] < bought[0]["kl"]
    assert bought[0]["k_chunk"] == answer("tune-device", "three", "--budget", 8)["k_chunk"]
    assert answer("show", "three")["certificate"]["ways"] == [*before, bought[1], bought[0]]
    certificate = Certificate.of(services.store().path("three"))
    grown = 100 * (bought[1]["perplexity"] / certificate.source_perplexity - 1)
    assert (certificate.lost(100), certificate.lost(5)) == (pytest.approx(grown), None)
    plain = 100 * (before[0]["perplexity"] / certificate.source_perplexity - 1)
    assert certificate.lost(0) == pytest.approx(plain)
    assert "within 100 %: KL" in run("show", "three").stdout
    assert answer("verify", "three")["ok"]


def test_for_a_person(run: Run, clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "knee.svg"
    result = run("tune-device", "--budget", 8, "--plot", file)
    assert "demo at 4 bits on" in result.stdout
    assert "gate_up" in result.stdout
    assert "of the 8 % allowed" in result.stdout
    assert "found in" in result.stdout
    assert re.search(r"recovers about \d+% of what low bits lose", result.stdout)
    assert "k_chunk" in result.stdout
    assert "tuning demo for" in result.stderr
    assert file.read_text().startswith("<?xml")
    again = run("tune-device", "--budget", 8)
    assert "from the saved profile" in again.stdout
    assert again.stderr == ""


def test_the_budget_of_the_settings_and_the_default(
    answer: Answer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer("tune-device")["budget_percent"] == 5, "a budget of 0 is no answer to what to tune for"
    monkeypatch.setenv("LOWBIT_CHAT_BUDGET", "12.5")
    assert answer("tune-device")["budget_percent"] == 12.5


def test_a_simulated_device(answer: Answer, run: Run, tmp_path: Path) -> None:
    found = answer("tune-device", *SIMULATED, "--budget", 2.5)
    assert found.keys() == FIELDS | {"simulated"}
    assert found["prompts"] is None
    assert found["offer"] is None
    assert (found["device"], found["budget_percent"]) == ("rtx-4050m", 2.5)
    assert found["measured_slowdown_percent"] is None
    assert set(found["k_chunk"]) == set(found["n_tb"]) == {"qkv", "o", "gate_up", "down"}
    assert found["n_tb_max"] >= max(found["n_tb"].values())
    file = tmp_path / "knee.svg"
    shown = run("tune-device", *SIMULATED, "--budget", 2.5, "--plot", file).stdout
    assert "n_tb" in shown
    assert "simulated in" in shown
    assert file.stat().st_size > 1000


def test_devices_are_listed(
    run: Run, answer: Answer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = run("tune-device", "--list-devices").stdout
    assert "rtx-4050m" in listed
    assert "RTX 4090" in listed
    devices = answer("tune-device", "--list-devices")["devices"]
    assert {"id", "memory_gb_s", "pcie_gb_s", "sm_count", "source"} <= devices[0].keys()
    monkeypatch.setattr("sys.argv", ["tune-device", "--list-devices", "--json"])  # the program's own name
    with pytest.raises(SystemExit) as ended:
        start.tune()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["devices"] == devices


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--simulate", "rtx-4050", "--shape", "llama-3-8b"], "did you mean rtx-4050m"),
        (["--simulate", "hal-9000", "--shape", "llama-3-8b"], "--list-devices"),
        (["--simulate", "rtx-4050m", "--shape", "llama-3-8"], "did you mean llama-3-8b"),
        (["--simulate", "rtx-4050m", "--shape", "llama-3-8b", "--bits", 5], "5 bits"),
        (["--simulate", "rtx-4050m", "--shape", "llama-3-8b", "--method", "magic"], "called 'magic'; there are rtn"),
        (["demo", "--backend", "reference"], "not tuned"),
        (["nowhere"], "no stored model 'nowhere'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_cannot_be_tuned(error: Error, arguments: list[object], said: str) -> None:
    assert said in error("tune-device", *arguments)


def test_a_model_without_residuals(answer: Answer, error: Error, run: Run, checkpoint: Path) -> None:
    answer("quantize", checkpoint, "--residual-bits", 0, "--name", "bare")
    assert "--residual-bits 4" in error("tune-device", "bare")
    result = run("run", "bare", "hi", "--max-tokens", 1, "--budget", 5)
    assert "without residuals" in result.stderr
    assert run("run", "bare", "hi", "--max-tokens", 1, "--raw").stderr == ""


@pytest.mark.parametrize(
    "failure", [TimerError("the device vanished; tune again"), BackendError("the card is gone; is it still there?")]
)
def test_a_device_that_vanishes(error: Error, answer: Answer, run: Run, clock: Clock, failure: Exception) -> None:
    def vanished(*_: object) -> float:
        raise failure

    clock.seconds = vanished  # type: ignore[method-assign]
    assert str(failure) in error("tune-device", "demo")
    result = run("run", "demo", "hi", "--max-tokens", 2, "--budget", 5)
    assert "without error compensation" in result.stderr
    assert str(failure) in result.stderr
    assert answer("run", "demo", "hi", "--max-tokens", 1, "--budget", 5)["k_chunk"] == dict.fromkeys(KINDS, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget", "0"],
        ["--budget", "101"],
        ["--budget", "-2"],
        ["--budget", "nan"],
        ["--simulate", "rtx-4050m"],
        ["--shape", "llama-3-8b"],
        ["--bits", "3"],
        ["demo", "--simulate", "rtx-4050m", "--shape", "llama-3-8b"],
        ["demo", "--plot", "knee.png"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    assert "Usage: " in run("tune-device", *arguments, code=2).stderr


def test_a_plot_without_its_library_is_refused_before_anything_is_tuned(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("tune-device", *SIMULATED, "--plot", tmp_path / "knee.svg", code=1)
    assert "lowbit-chat[plot]" in result.stderr
    assert result.stdout == ""


def test_run_is_tuned_once_and_says_so(answer: Answer, run: Run, clock: Clock) -> None:
    arguments = ("run", "demo", "hi", "--max-tokens", 2, "--raw")
    first = run(*arguments, "--budget", 8)
    assert "tuning demo for" in first.stderr
    found = answer(*arguments, "--budget", 8)
    assert min(found["k_chunk"].values()) > 0
    assert run(*arguments, "--budget", 8).stderr == ""
    assert answer(*arguments, "--budget", 0)["k_chunk"] == dict.fromkeys(KINDS, 0)


def test_a_single_answer_does_not_wait_for_the_tuning_of_prompts(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the answer, and Ctrl-C leaves it for the next time. An answer that is to repeat waits for it."""
    order: list[str] = []
    tune_prompts, answer = spending.tune_prompts, running._answer

    def tuned(decoder: Any, *arguments: Any, **options: Any) -> Any:
        order.append(f"prompts {decoder.options.prompt_k_chunk}")
        if order == ["answer", "prompts 0"]:
            signal.raise_signal(signal.SIGINT)
        return tune_prompts(decoder, *arguments, **options)

    async def answered(*arguments: Any) -> None:
        await answer(*arguments)
        order.append("answer")

    monkeypatch.setattr(spending, "tune_prompts", tuned)
    monkeypatch.setattr(running, "_answer", answered)
    for _ in range(3):
        run("run", "demo", "hi", "--max-tokens", 1, "--budget", 8)
    assert order == ["answer", "prompts 0"] * 2 + ["prompts 0", "answer"], "the third time they are known"
    for prompt_budget, option in enumerate((("--seed", 3), ("--temperature", 0)), 30):
        order.clear()
        run("run", "demo", "hi", "--max-tokens", 1, "--budget", 8, "--prompt-budget", prompt_budget, *option)
        assert order == ["prompts 0", "answer"]


def test_without_a_word_the_budget_is_5(answer: Answer, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWBIT_CHAT_BUDGET")
    asked: list[float] = []
    tune = spending.tune

    def spy(*arguments: Any, budget_percent: float, **options: Any) -> Any:
        asked.append(budget_percent)
        return tune(*arguments, budget_percent=budget_percent, **options)

    monkeypatch.setattr(spending, "tune", spy)
    answer("run", "demo", "hi", "--max-tokens", 1)
    monkeypatch.setenv("LOWBIT_CHAT_K_CHUNK", "7")
    assert set(answer("run", "demo", "hi", "--max-tokens", 1)["k_chunk"].values()) == {7}
    assert set(answer("run", "demo", "hi", "--max-tokens", 1, "--budget", 20)["k_chunk"].values()) != {7}
    assert asked == [5, 20]


def test_what_nobody_asked_for_is_not_spoken_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CHAT_BUDGET", "8")
    monkeypatch.setenv("LOWBIT_CHAT_CONTEXT", "100000")  # more than the model has
    arguments = ("run", "demo", "hi", "--max-tokens", 1, "--backend", "reference", "--raw")
    assert run(*arguments).stderr == ""
    assert "not tuned" in run(*arguments, "--budget", 8).stderr


def test_bench_compensates_only_where_it_is_asked_to(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CHAT_BUDGET", "8")
    monkeypatch.setattr("runtime.budget.tuning.clocks", None)  # nothing is measured
    assert "k_chunk" not in answer("bench", "demo", "--prompt-tokens", 20, "--decode-tokens", 10)


def test_ctrl_c_while_tuning_is_130(run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> float:
        signal.raise_signal(signal.SIGINT)
        return 1e-3

    monkeypatch.setattr(clock, "seconds", pressed)
    run("run", "demo", "hi", "--budget", 5, code=130)


def test_eval_with_a_budget(answer: Answer, run: Run, clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.\n")
    first = run("eval", "demo", "--text", file, "--budget", 8, "--json")
    assert "finding the compensation that 8 % slowdown allows; done once" in first.stderr
    found = json.loads(first.stdout)
    readings = clock.readings
    again = run("eval", "demo", "--text", file, "--budget", 8, "--json")
    assert (json.loads(again.stdout)["k_chunk"], clock.readings) == (found["k_chunk"], readings)
    assert "tuned" not in again.stderr, "the tuning that is there is used, in silence"
    assert min(found["k_chunk"].values()) > 0
    assert found["recall"] is not None
    fixed = answer("eval", "demo", "--text", file, "--k-chunk", found["k_chunk"]["qkv"])
    assert fixed["tokens"] == found["tokens"]
    assert answer("eval", "demo", "--text", file, "--budget", 0)["recall"] is None


@pytest.mark.parametrize("hindrance", [("--backend", "reference"), ("--window", 8)], ids=lambda value: value[0])
def test_eval_where_a_budget_has_no_effect(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hindrance: tuple[object, ...]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.\n")
    monkeypatch.setattr("runtime.budget.tuning.clocks", None)  # nothing is measured
    result = run("eval", "demo", "--text", file, "--budget", 8, *hindrance, "--json")
    assert set(json.loads(result.stdout)["k_chunk"].values()) == {0}
    assert "fixed k_chunk" in result.stderr


def test_bench_measures_what_it_costs(answer: Answer, run: Run, clock: Clock, services: Any) -> None:
    services.slowdown = lambda decoder, _cancelled: clock.slowdown(decoder.options.k_chunk)
    lengths = ("--prompt-tokens", 20, "--decode-tokens", 10)
    found = answer("bench", "demo", *lengths, "--budget", 8)
    assert 0 < found["slowdown_percent"] <= 8
    assert min(found["k_chunk"].values()) > 0
    assert "slower than without" in run("bench", "demo", *lengths, "--budget", 8).stdout
    none = answer("bench", "demo", *lengths, "--budget", 0)
    assert (none["slowdown_percent"], set(none["k_chunk"].values())) == (0, {0})


def test_serve_passes_the_budget_on(run: Run, services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.load.plan import LoadOptions
    from runtime.server import serve

    served: list[Any] = []
    how: list[Any] = []
    services.service = lambda defaults, **own: served.append(defaults) or how.append(own)
    monkeypatch.setattr(serve, "run", lambda _service, *, model, **_: served.append(model) or 0)
    run("serve", "--model", "demo", "--budget", 2.5)
    run("serve", "--k-chunk", 4, "--kv", "int8", "--context", 512)
    usual, first, other, _ = served
    served.clear()
    run("serve", "--speculate")
    monkeypatch.setenv("LOWBIT_CHAT_HISTORY", "off")
    monkeypatch.setenv("LOWBIT_CHAT_MAX_MODELS", "5")
    run("serve", "--speculate", "--kv", "int8")
    assert [how[0], how[-1]] == [{"keeps": True, "max_models": 3}, {"keeps": False, "max_models": 5}]
    assert [one.kv for one in served if isinstance(one, LoadOptions)] == [None, "int8"]
    assert usual == LoadOptions(compensation=Compensation(budget_percent=2.5))
    assert (first.model, first.compensation) == ("demo", None), "that of the service applies"
    assert other == LoadOptions(compensation=Compensation(k_chunk=4), kv="int8", context=512)
    served.clear()
    run("serve", "--budget", "exact")
    monkeypatch.setenv("LOWBIT_CHAT_BUDGET", "exact")
    run("serve")
    exact = [one.compensation for one in served if isinstance(one, LoadOptions)]
    assert exact == [Compensation(exact=True), Compensation(exact=True, or_usual=True)]
