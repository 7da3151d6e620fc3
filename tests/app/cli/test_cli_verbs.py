"""Output of quantize, pull, eval, bench and config."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.services import Services
from models.recipe import GOOD_FOR
from runtime.backends import Presence
from runtime.backends.cpu.backend import CpuBackend
from runtime.errors import OutOfMemoryError
from runtime.load import plan as planning
from tuner import bandwidth
from tuner.bandwidth import ReadBandwidth
from tuner.gpu import GpuInfo

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
Error = Callable[..., str]
SENTENCE = "The quick brown fox jumps over the lazy dog.\n"
EVAL_FIELDS = {
    "perplexity", "nll_sum", "tokens", "kv", "bits", "k_chunk", "prompt_k_chunk", "select", "recall", "seconds",
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(SENTENCE * 6)
    return file


def test_quantize(answer: Answer, checkpoint: Path, services: Any) -> None:
    found = answer("quantize", checkpoint, "--bits", 3, "--residual-bits", 8, "--group-size", 32, "--name", "three")
    assert found.keys() == {
        "name", "bits_per_weight", "gpu_bytes", "cpu_residual_bytes", "perplexity_before", "perplexity_after",
        "seconds",
    }  # fmt: skip
    assert found["name"] == "three"
    assert found["bits_per_weight"] > 3
    assert found["cpu_residual_bytes"] > 0
    assert min(found["perplexity_before"], found["perplexity_after"]) > 1
    recipe = services.quantized[0]
    assert (recipe.bits, recipe.residual_bits, recipe.group_size, recipe.method) == (3, 8, 32, "gptq")


def test_quantize_with_even_keys(answer: Answer, checkpoint: Path, services: Any) -> None:
    found = answer("quantize", checkpoint, "--smooth-attention")
    assert found["name"].endswith("-trellis-4bit-sa")
    assert services.quantized[0].smooth_attention
    assert answer("show", found["name"])["smooth_attention"] is True
    assert not answer("quantize", checkpoint, "--no-smooth-attention")["name"].endswith("-sa")
    assert not services.quantized[1].smooth_attention


def test_quantize_with_the_steps_of_qoq_that_are_asked_for(
    answer: Answer, run: Run, checkpoint: Path, services: Any
) -> None:
    qoq = ("--method", "qoq", "--group-size", 32)
    assert answer("quantize", checkpoint, *qoq, "--with", "rotate", "--without", "clip")["name"].endswith(
        "-qoq-4bit-g32-rotate-no-clip"
    )
    recipe = services.quantized[0]
    assert (recipe.rotate, recipe.clip, recipe.reorder) == (True, False, True)
    both = run("quantize", checkpoint, *qoq, "--with", "clip", "--without", "clip", code=2)
    assert "clip is both asked for" in both.stderr
    assert "--with is for the method" in run("quantize", checkpoint, "--with", "rotate", code=2).stderr


def test_quantize_to_an_average(answer: Answer, run: Run, checkpoint: Path, services: Any) -> None:
    found = answer("quantize", checkpoint, "--bits", 3.5, "--method", "gptq")
    assert found["name"].endswith("-gptq-3.5bit")
    whole = [answer("quantize", checkpoint, "--bits", bits, "--name", f"whole{bits}") for bits in (3, 4)]
    assert whole[0]["bits_per_weight"] < found["bits_per_weight"] < whole[1]["bits_per_weight"]
    assert (services.quantized[0].bits, services.quantized[0].method) == (3.5, "gptq")
    shown = answer("show", found["name"])
    assert (shown["bits"], sorted(shown["block_bits"])) == (3.5, [3, 4])
    assert answer("show", "whole3")["block_bits"] is None
    assert answer("run", found["name"], "hi", "--max-tokens", 1)["bits"] == 3.5
    assert "3.5" in run("list").stdout


@pytest.mark.parametrize("group", [(), ("chats",), ("config",)])
def test_help_lists_commands_with_whole_sentences(group: tuple[str, ...], run: Run) -> None:
    listed = run(*group, "--help").stdout.partition("Commands:")[2]
    assert listed.strip()
    assert "..." not in listed


def test_help_says_what_each_method_is_good_for(run: Run) -> None:
    told = " ".join(run("quantize", "--help").stdout.split())
    assert all(f"{method} ({words})" in told for method, words in GOOD_FOR.items())


def test_quantize_the_bundled_model_and_a_hub_name(answer: Answer, services: Any) -> None:
    assert answer("quantize", "demo", "--name", "again")["name"] == "again"
    assert answer("quantize", "some/tiny")["name"] == "some/tiny-trellis-4bit"
    assert services.pulled == [("some/tiny", None)]


def test_a_taken_name_needs_force(answer: Answer, error: Error, checkpoint: Path, stored: str) -> None:
    assert "small" in error("quantize", checkpoint, "--bits", 3, "--name", stored)
    assert answer("quantize", checkpoint, "--bits", 3, "--name", stored, "--force")["name"] == stored
    assert answer("show", stored)["bits"] == 3


def test_calibration_text(answer: Answer, error: Error, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    answer("quantize", checkpoint, "--calibration", text, "--name", "mine")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error("quantize", checkpoint, "--calibration", binary, "--name", "other")
    assert "No such file" in error("quantize", checkpoint, "--calibration", tmp_path / "none", "--name", "other")


def test_pull(answer: Answer, run: Run, services: Any) -> None:
    found = answer("pull", "some/tiny", "--revision", "main")
    assert found.keys() == {"name", "revision", "path", "bytes", "seconds"}
    assert (found["name"], found["revision"], found["path"]) == ("some/tiny", "abc123", str(services.snapshot))
    assert found["bytes"] > 10_000
    assert services.pulled == [("some/tiny", "main")]
    answer("quantize", "some/tiny")
    assert len(services.pulled) == 1, "what is in the cache is not asked for again"
    assert run("pull", "some/tiny").stdout == f"{services.snapshot}\n"


def test_eval(answer: Answer, text: Path) -> None:
    found = answer("eval", "demo", "--text", text, "--window", 64, "--stride", 32, "--k-chunk", 0)
    assert found.keys() == EVAL_FIELDS
    assert found["tokens"] == len(SENTENCE) * 6 - 1
    assert math.isclose(found["perplexity"], math.exp(found["nll_sum"] / found["tokens"]))
    assert (found["kv"], found["bits"], found["select"], found["recall"]) == ("int4", 4, "approx", None)
    assert answer("eval", "demo", "--text", text, "--max-tokens", 50)["tokens"] == 49


def test_eval_as_a_chat(answer: Answer, text: Path) -> None:
    span = ("--text", text, "--window", 64, "--stride", 32, "--max-tokens", 160)
    plain = answer("eval", "demo", *span, "--k-chunk", 0)
    chat = answer("eval", "demo", *span, "--k-chunk", 0, "--as-chat")
    every = answer("eval", "demo", *span, "--k-chunk", 1024, "--as-chat")
    full = answer("eval", "demo", *span, "--full-precision", "--as-chat")
    assert chat.keys() == plain.keys()
    assert plain["tokens"] == 159
    assert chat["tokens"] == every["tokens"] == full["tokens"] == 128
    assert every["nll_sum"] != chat["nll_sum"]


def test_eval_with_compensation(answer: Answer, text: Path) -> None:
    plain = answer("eval", "demo", "--text", text, "--k-chunk", 0, "--kv", "fp16")
    some = answer("eval", "demo", "--text", text, "--k-chunk", 512, "--kv", "int8")
    every = answer("eval", "demo", "--text", text, "--k-chunk", 1024, "--select", "exact", "--kv", "fp16")
    full = answer("eval", "demo", "--text", text, "--full-precision")
    assert some["recall"] is not None
    assert 0 < some["recall"] <= 1
    assert (some["kv"], some["k_chunk"]["down"]) == ("int8", 512)
    assert (every["recall"], every["select"]) == (None, "exact")
    assert abs(every["nll_sum"] - full["nll_sum"]) < abs(plain["nll_sum"] - full["nll_sum"])
    assert full.keys() == EVAL_FIELDS
    assert (full["bits"], full["kv"], full["k_chunk"], full["select"]) == (16, None, None, None)


@pytest.mark.parametrize("full", [False, True])
def test_eval_of_windows_beyond_the_context(answer: Answer, error: Error, text: Path, full: bool) -> None:
    arguments = ("eval", "demo", "--text", text, *(("--full-precision",) if full else ("--k-chunk", 0)))
    assert "longer than this model's context of 256" in error(*arguments, "--window", 257)
    assert answer(*arguments, "--window", 256)["tokens"] == len(SENTENCE) * 6 - 1


@pytest.mark.parametrize("select", ["approx", "exact", "static", "random"])
@pytest.mark.parametrize("window", [(100, 30), (60, 60)], ids=str)
def test_eval_with_every_selector(answer: Answer, text: Path, select: str, window: tuple[int, int]) -> None:
    span = ("--window", window[0], "--stride", window[1], "--max-tokens", 120)
    found = answer("eval", "demo", "--text", text, "--k-chunk", 100, "--select", select, *span)
    assert found["tokens"] == (119 if window[1] < window[0] else 118)
    assert (found["select"], found["recall"] is not None) == (select, select == "approx")
    assert set(found["k_chunk"].values()) == {100}
    again = answer("eval", "demo", "--text", text, "--k-chunk", 100, "--select", select, *span)
    assert again["nll_sum"] == found["nll_sum"]


def test_eval_takes_the_file_as_it_is(answer: Answer, tmp_path: Path) -> None:
    for name, content in {"unix": b"a\nb\nc", "windows": b"a\r\nb\r\nc"}.items():
        (tmp_path / name).write_bytes(content)
        assert answer("eval", "demo", "--text", tmp_path / name, "--k-chunk", 0)["tokens"] == len(content) - 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "0 tokens"), (b"\xff\xfe", "UTF-8"), (None, "No such file")],
    ids=["empty", "binary", "none"],
)
def test_eval_of_no_text(error: Error, tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    assert said in error("eval", "demo", "--text", file)


def test_bench(answer: Answer, run: Run) -> None:
    found = answer("bench", "demo", "--prompt-tokens", 20, "--decode-tokens", 10, "--kv", "fp16")
    assert found.keys() == {
        "ttft_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "bytes_per_token",
        "bandwidth_limit_gb_s",
        "percent_of_limit",
        "peak_memory_bytes",
        "kv_bytes_per_token",
        "device",
        "power",
    }
    assert found["kv_bytes_per_token"] == 2 * 2 * 32 * 2  # keys and values, layers, width, bytes
    assert found["bandwidth_limit_gb_s"] == 10.0
    expected = found["decode_tokens_per_s"] * found["bytes_per_token"] / 1e10 * 100
    assert math.isclose(found["percent_of_limit"], expected)
    assert "tokens/s" in run("bench", "--prompt-tokens", 4, "--decode-tokens", 4).stdout


def test_bench_on_a_card_names_it_and_compares_with_its_memory(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    card = GpuInfo(
        name="NVIDIA RTX", vendor="nvidia", memory_total_bytes=None, memory_free_bytes=None, compute_capability="8.9",
        driver=None, pcie=None,
    )  # fmt: skip
    monkeypatch.setattr(CpuBackend, "memory_gb_s", lambda self: 192.0)
    monkeypatch.setattr(CpuBackend, "probe", lambda self: Presence(usable=True, reason="it runs", gpu=card))
    found = answer("bench", "demo", "--prompt-tokens", 4, "--decode-tokens", 4, "--backend", "cpu")
    assert (found["device"], found["bandwidth_limit_gb_s"]) == ("NVIDIA RTX", 192.0)


def test_loads_look_where_commands_store_the_speed_of_the_memory(error: Error, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ReadBandwidth(gb_s=10.0, threads=1, buffer_bytes=1, boot="")
    monkeypatch.setattr(bandwidth, "measure", lambda *_: measured)
    folders: list[Path] = []

    def refuse(*_: Any, measurements: Path, **__: Any) -> None:
        folders.append(measurements)
        raise OutOfMemoryError("no room")

    monkeypatch.setattr(planning, "plan_load", refuse)
    assert "no room" in error("bench", "demo")
    assert Services().bandwidth(fresh=False) == measured
    assert [file.name for file in folders[0].iterdir()] == ["bandwidth.json"]


@pytest.mark.parametrize("kv", ["int4", "kivi2"])
def test_bench_of_a_kind_of_cache(answer: Answer, kv: str) -> None:
    lengths = ("--prompt-tokens", 20, "--decode-tokens", 4, "--backend", "reference")
    plain, found = answer("bench", "demo", *lengths, "--kv", "fp16"), answer("bench", "demo", *lengths, "--kv", kv)
    assert found["kv_bytes_per_token"] < plain["kv_bytes_per_token"] / 1.5


def test_bench_with_so_many_tokens_in_the_cache(answer: Answer, run: Run) -> None:
    lengths = ("--prompt-tokens", 20, "--decode-tokens", 4, "--backend", "reference", "--at", 64, "--at", 128)
    found = answer("bench", "demo", *lengths)["at"]
    assert [row["tokens"] for row in found] == [64, 128]
    assert found[1]["kv_bytes"] == 128 * 2 * 2 * 32 * 2
    assert all(row["decode_tokens_per_s"] > 0 for row in found)
    assert "copies of pages" in run("bench", "demo", *lengths).stdout


def test_bench_of_what_does_not_fit(error: Error) -> None:
    assert "256" in error("bench", "demo", "--prompt-tokens", 250, "--decode-tokens", 10)


def test_config(run: Run, isolated_home: Path) -> None:
    assert run("config", "path").stdout == f"{isolated_home / 'settings.toml'}\n"
    assert run("config", "get", "k_chunk").stdout == "auto\n"
    run("config", "set", "k_chunk", "8")
    assert run("config", "get", "k_chunk").stdout == "8\n"
    assert "k_chunk" in run("config").stdout
    run("config", "set", "endpoint_token", "sesame")
    assert "sesame" not in run("config").stdout
    run("config", "set", "k_chunk", "auto")
    assert run("config", "get", "k_chunk").stdout == "auto\n"


@pytest.mark.parametrize(
    "arguments", [("get", "no_such"), ("set", "no_such", "1"), ("set", "top_p", "7"), ("set", "kv", "int3")]
)
def test_config_of_what_is_not_acceptable(error: Error, arguments: tuple[str, ...]) -> None:
    assert error("config", *arguments)


def test_config_of_a_token_that_would_travel_unencrypted(run: Run, error: Error) -> None:
    """Whichever of the two is set last; a file that a person wrote says `auto` where there is no endpoint."""
    Path(run("config", "path").stdout.strip()).write_text('endpoint = "auto"\n')
    run("config", "set", "endpoint_token", "sesame")
    assert "to gpu:8000 unencrypted" in error("config", "set", "endpoint", "http://gpu:8000/v1")
    run("config", "set", "endpoint", "https://gpu/v1")
    run("config", "set", "endpoint_token", "")
    run("config", "set", "endpoint", "http://gpu:8000/v1")
    assert "to gpu:8000 unencrypted" in error("config", "set", "endpoint_token", "sesame")
    assert "enter http" in error("config", "set", "endpoint", "gpu:8000")
    assert run("config", "get", "endpoint").stdout == "http://gpu:8000/v1\n"


def test_numbers_that_json_lacks_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    from app.cli.output import Output

    Output(as_json=True).result({"a": math.inf, "b": [math.nan, 1.5], "c": {"d": -math.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": None}}
