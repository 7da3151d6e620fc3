"""From checkpoint to stored model on tiny random models: content, resume, errors."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from models.checkpoint import Checkpoint
from models.errors import CancelledError, CheckpointError, QuantizationError, StoreError, UnsupportedModelError
from models.oracle import Oracle
from models.progress import Progress
from models.quantize import lowered, matrix, outer, pipeline, quantize, streams
from models.quantize import text as text_module
from models.quantize.quality import Layout, Quality, Trial, trials
from models.quantize.text import token_windows
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.recipe import DEFAULT_GROUP_SIZE, METHODS, Method, Recipe
from models.store import Store, StoredModel, StoredModelInfo, layout
from models.store import durable as durable_module
from tests.close import assert_close
from tests.grid import combined
from tests.models.conftest import TEXT, content, spoil, write_checkpoint, write_tokenizer
from tests.models.random_models import random_case, with_mtp
from tests.models.restored import Restored

Run = Callable[..., StoredModelInfo]


def perplexity(weights: Restored | Checkpoint, folder: Path, text: str, k_chunk: int = 0) -> float:
    """As a chat gets it: the first half of a window without compensation, the second half with it, in two steps."""
    total, count = 0.0, 0
    for tokens in token_windows(folder, weights.spec, text, 1024, "evaluation"):
        oracle, half = Oracle(weights), tokens.shape[1] // 2
        cache = oracle.cache(*tokens.shape)
        first = oracle.logits(tokens[:, :half], cache)[:, -1:]
        if k_chunk:
            assert isinstance(weights, Restored)
            names = weights.spec.linear_names()
            oracle.replace = {name: compensated(weights, name, k_chunk) for name in names}
        logits = torch.cat((first, oracle.logits(tokens[:, half:], cache)[:, :-1]), 1)
        chosen = logits.log_softmax(-1).gather(2, tokens[:, half:, None])
        total, count = total - float(chosen.double().sum()), count + chosen.numel()
    return float(np.exp(total / count))


def compensated(weights: Restored, name: str, k_chunk: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer narrower than 1024 channels whose largest inputs meet the residuals too."""
    weight, bias = weights.linear(name)
    packed = weights.model.linear(name)
    assert packed.residual is not None
    residual = torch.from_numpy(dequantize_residual(packed.residual, packed.shape))

    def run(x: torch.Tensor) -> torch.Tensor:
        count = -(-x.shape[-1] * k_chunk // 1024)
        chosen = torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.abs().topk(count, -1).indices, value=True)
        return torch.nn.functional.linear(x, weight, bias) + (x * chosen) @ residual

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, bytes]:
    """Files of the model that `run()` makes."""
    store, recipe = Store(tmp_path_factory.mktemp("undisturbed")), Recipe(bits=3, group_size=32)
    info = quantize(tiny_checkpoint, store, recipe, calibration=TEXT, evaluation=TEXT[:300])
    return content(info.path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def run(store: Store, tiny_checkpoint: Path) -> Run:
    def run(folder: Path = tiny_checkpoint, recipe: Recipe | None = None, **options: object) -> StoredModelInfo:
        texts = {"calibration": TEXT, "evaluation": TEXT[:300]}
        return quantize(folder, store, recipe or Recipe(bits=3, group_size=32), **(texts | options))

    return run


RAGGED: dict[str, Any] = {"hidden": 72, "intermediate": 100, "vocabulary": 97, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("options", "residual_bits"),
    [
        ({}, 4),
        ({"family": "qwen2", "tied": False, "shards": 3, "dtype": torch.float16}, 4),
        *((RAGGED, bits) for bits in (0, 2, 4, 8, 16)),
    ],
    ids=["tied", "biases-untied-sharded", *(f"ragged-{bits}" for bits in (0, 2, 4, 8, 16))],
)
def test_stored_tensors_belong_to_the_checkpoint(
    run: Run, store: Store, tmp_path: Path, options: dict[str, object], residual_bits: int
) -> None:
    folder = write_checkpoint(tmp_path / "source", **options)
    info = run(folder, Recipe(bits=3, group_size=32, residual_bits=residual_bits))
    model, checkpoint = store.open(info.name), Checkpoint.open(folder)
    assert model.spec == checkpoint.spec
    np.testing.assert_array_equal(model.embedding(), checkpoint.embedding().half().numpy())
    np.testing.assert_array_equal(model.vector("norm"), checkpoint.vector("norm").numpy())
    tolerance = {0: 0.0, 2: 0.08, 4: 0.02, 8: 2e-3, 16: 2e-4}[residual_bits]
    for name in model.spec.linear_names():
        weight, bias = (None if tensor is None else tensor.float().numpy() for tensor in checkpoint.linear(name))
        linear = model.linear(name)
        approximation = dequantize(linear)
        assert np.abs(approximation - weight).mean() < 0.12 * np.abs(weight).mean() * (2 if linear.bits == 3 else 1)
        if bias is None:
            assert linear.bias is None
        else:
            np.testing.assert_array_equal(linear.bias, bias)
        if residual_bits == 0:
            assert linear.residual is linear.rank_maximum is linear.mean_square is None
            continue
        assert linear.residual is not None
        restored = approximation + dequantize_residual(linear.residual, linear.shape).T
        assert np.abs(restored - weight).mean() <= tolerance * np.abs(weight).mean()
        assert (np.diff(linear.rank_maximum) <= 0).all()
        assert 0 < linear.mean_square.max() <= linear.rank_maximum[0] ** 2


def test_statistics_are_those_of_the_full_precision_model(run: Run, store: Store, tiny_checkpoint: Path) -> None:
    model = store.open(run().name)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    seen: dict[str, list[np.ndarray]] = {}
    oracle = Oracle(checkpoint, observe=lambda name, x: seen.setdefault(name, []).append(x.flatten(0, 1).numpy()))
    for tokens in token_windows(tiny_checkpoint, checkpoint.spec, TEXT, 2048, "calibration"):
        oracle.logits(tokens)
    for name in model.spec.linear_names():
        x = np.concatenate(seen[name])
        linear = model.linear(name)
        assert_close(linear.mean_square, (x**2).mean(0), "relative")
        assert_close(linear.rank_maximum, (-np.sort(-np.abs(x), axis=1)).max(0), "relative")


def test_perplexities_are_those_of_the_models(run: Run, store: Store, tiny_checkpoint: Path) -> None:
    info = run(recipe=Recipe(bits=3, group_size=32, expected_k_chunk=256))
    before = perplexity(Checkpoint.open(tiny_checkpoint), tiny_checkpoint, TEXT[:300])
    after = perplexity(Restored(store.open(info.name), residuals=False), tiny_checkpoint, TEXT[:300], k_chunk=64)
    assert info.summary.perplexity_before == pytest.approx(before, rel=1e-4)
    assert info.summary.perplexity_after == pytest.approx(after, rel=1e-4)
    assert before != pytest.approx(after, rel=1e-3)


def test_pieces_of_a_matrix_give_what_the_whole_gives(
    run: Run, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are handled a range of rows at a time; here 32 rows, so that perplexities are put together from three."""
    monkeypatch.setattr(matrix, "_PIECE", 32 * 64)
    monkeypatch.setattr(outer, "_PIECE", 10 * 64)
    info = run()
    for file, data in content(info.path).items():
        assert file.endswith(".json") or file == layout.REFERENCE or data == undisturbed[file]
    found, wanted = (
        load(each) for each in ((info.path / layout.REFERENCE).read_bytes(), undisturbed[layout.REFERENCE])
    )
    np.testing.assert_allclose(found["log_probabilities"], wanted["log_probabilities"], rtol=1e-5, atol=1e-5)
    assert np.mean(found["leaders"] == wanted["leaders"]) > 0.99, "but where two are as likely"
    whole = json.loads(undisturbed["recipe.json"])["quality"]
    assert info.summary.perplexity_before == pytest.approx(whole["perplexity_before"], rel=1e-6)
    assert info.summary.perplexity_after == pytest.approx(whole["perplexity_after"], rel=1e-6)


def test_likelihood_in_pieces_is_that_of_all_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(11, 8, generator=generator), 3 * torch.randn(50, 8, generator=generator)
    targets = torch.randint(0, 50, (11,), generator=generator)
    likelihood = outer.Likelihood(targets)
    for start in range(0, 50, 16):
        likelihood.add(slice(start, min(start + 16, 50)), x @ weight[start : start + 16].T)
    expected = torch.nn.functional.cross_entropy(x @ weight.T, targets).exp()
    assert likelihood.perplexity() == pytest.approx(float(expected), rel=1e-5)


def test_the_low_bit_stream_begins_with_the_stored_embedding(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", dtype=torch.float32))
    tokens = torch.arange(3, 20)[None]
    start = streams.Streams.start(checkpoint, [], [tokens], [], trials(Recipe(bits=3)))
    table = checkpoint.embedding()
    assert torch.equal(start.full[0], table[tokens])
    stored = table[tokens].half().float()
    assert not torch.equal(stored, start.full[0])
    assert torch.equal(start.low[0], torch.cat((stored, stored[:, 8:], stored[:, 8:]), 1))
    assert torch.equal(start.finer[0], stored)


@pytest.mark.parametrize("case", ["llama3", "mistral-window", "lfm2", "qwen3.5"])
def test_branches_behind_a_common_beginning_are_the_texts_they_stand_for(tmp_path: Path, case: str) -> None:
    random_case(case).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    oracle, texts = Oracle(checkpoint), torch.randn(2, 9, checkpoint.spec.hidden_size)
    texts[1, :4] = texts[0, :4]  # alike in the first half
    layout = Layout.of(14, 2)
    assert layout == Layout(prompt=4, decoded=5)
    places, branches = layout.places(2)
    joined = oracle.block(0, torch.cat((texts[0], texts[1, 4:]))[None], places, branches=branches)
    for index, passed in enumerate(oracle.block(0, texts)):
        torch.testing.assert_close(joined[0, layout.branch(index)], passed[4:])


def test_summary_counts_real_bytes(run: Run, store: Store, tiny_checkpoint: Path) -> None:
    info = run()
    model = store.open(info.name)
    linears = [model.linear(name) for name in model.spec.linear_names()]
    code_bytes = sum(linear.codes.nbytes + linear.scales.nbytes + linear.zeros.nbytes for linear in linears)
    weights = sum(linear.shape[0] * linear.shape[1] for linear in linears)
    assert info.summary.bits_per_weight == pytest.approx(8 * code_bytes / weights, abs=1e-4)
    assert info.summary.residual_bytes == sum(linear.residual.codes.nbytes for linear in linears)
    norms = 4 * 64 * (2 * model.spec.num_layers + 1)
    scales = sum(linear.residual.scales.nbytes for linear in linears)
    assert info.summary.gpu_bytes == code_bytes + norms + scales
    files = [path for path in info.path.iterdir() if path.name != "manifest.json"]
    assert info.summary.disk_bytes == sum(path.stat().st_size for path in files)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    count = sum(checkpoint.linear(name)[0].numel() for name in checkpoint.spec.linear_names())
    assert info.summary.parameters == checkpoint.spec.parameters == count + norms // 4


def test_a_name_says_source_and_recipe_and_needs_force_to_be_used_again(run: Run, store: Store) -> None:
    first = run()
    assert first.name == "tiny-gptq-3bit-g32"
    assert run(recipe=Recipe(), name="org/mine").name == "org/mine"
    before = content(first.path)
    with pytest.raises(StoreError, match="--force"):
        run(name=first.name, recipe=Recipe(bits=4))
    assert content(first.path) == before
    assert run(name=first.name, recipe=Recipe(bits=4), force=True).recipe.bits == 4
    assert [info.name for info in store.list()] == ["org/mine", first.name]
    assert sorted(path.name for path in store.root.iterdir()) == [
        ".locks",
        ".origins.json",
        ".work",
        "org--mine",
        first.name,
    ]
    assert list((store.root / ".work").iterdir()) == []


def test_progress_only_grows_and_the_same_input_gives_the_same_bytes(run: Run, undisturbed: dict[str, bytes]) -> None:
    reports: list[Progress] = []
    assert content(run(progress=reports.append).path) == undisturbed
    phases = list(dict.fromkeys(report.phase for report in reports))
    assert phases == ["check", "tokenizer", "quantize", "verify"]
    for phase in ("check", "quantize", "verify"):
        done = [report.done for report in reports if report.phase == phase]
        assert done == sorted(done)
        assert done[-1] == [report.total for report in reports if report.phase == phase][-1]


@pytest.mark.parametrize("reports_before", [1, 3, 12, 25, 30, 34])
def test_a_cancelled_run_goes_on_where_it_stopped(
    run: Run, store: Store, undisturbed: dict[str, bytes], reports_before: int
) -> None:
    reports: list[Progress] = []
    with pytest.raises(CancelledError):
        run(name="stopped", progress=reports.append, cancelled=lambda: len(reports) >= reports_before)
    assert "stopped" not in store
    blocks_before = int(max((report.done for report in reports if report.phase == "quantize"), default=0))
    reports = []
    assert content(run(name="stopped", progress=reports.append).path) == undisturbed
    assert min(report.done for report in reports if report.phase == "quantize") >= blocks_before


def test_blocks_whose_states_were_not_saved_are_made_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "source", layers=4)
    expected = content(run(folder, name="whole").path)
    monkeypatch.setattr(pipeline, "_BETWEEN", 1e9)  # after the first block and the last one alone
    reports: list[Progress] = []
    with pytest.raises(CancelledError):
        run(
            folder,
            name="stopped",
            progress=reports.append,
            cancelled=lambda: bool(reports) and reports[-1].unit == "blocks" and reports[-1].done >= 3,
        )
    reports = []
    assert content(run(folder, name="stopped", progress=reports.append).path) == expected
    assert min(report.done for report in reports if report.phase == "quantize") == 1


@pytest.mark.parametrize(
    *combined(
        [*(("qwen3.5", method) for method in METHODS if method != "awq-gptq"), ("lfm2", "awq-gptq")],
        case=["lfm2", "qwen3.5"],
        method=METHODS,
    )
)
def test_blocks_with_states_are_quantized_by_every_method(tmp_path: Path, case: str, method: Method) -> None:
    random_case(case).save_pretrained(tmp_path / "source")
    write_tokenizer(tmp_path / "source", 67)
    size = DEFAULT_GROUP_SIZE if method == "trellis" else 32
    store, recipe = Store(tmp_path / "store"), Recipe.usual(method, group_size=size, smooth_attention=True)
    info = quantize(tmp_path / "source", store, recipe, calibration=TEXT, evaluation=TEXT[:200])
    model = store.open(info.name)
    assert model.vector("layers.0.conv").shape == ((3 * 32,) if case == "lfm2" else (4 * 80,))
    assert [model.key_statistics(layer) is None for layer in range(3)] == [True, False, True]
    assert info.summary.perplexity_after == pytest.approx(info.summary.perplexity_before, rel=0.5)


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *(("falcon-h1", method) for method in ("trellis", "gptq")),
        *(pytest.param("nemotron-h", method, marks=pytest.mark.slow) for method in ("awq", "squeezellm")),
        *((case, "qoq") for case in ("nemotron-h", "apertus", "cohere2")),
    ],
)
def test_blocks_of_other_parts_are_quantized(tmp_path: Path, case: str, method: Method) -> None:
    """Two mixers or no MLP, MLPs without gates, and attention beside an MLP."""
    random_case(case).save_pretrained(tmp_path / "source")
    write_tokenizer(tmp_path / "source", 67)
    store, recipe = (
        Store(tmp_path / "store"),
        Recipe.usual(method, **({} if method == "trellis" else {"group_size": 32})),
    )
    info = quantize(tmp_path / "source", store, recipe, calibration=TEXT, evaluation=TEXT[:200])
    assert info.summary.perplexity_after == pytest.approx(info.summary.perplexity_before, rel=0.5)


def test_two_mixers_are_refused_by_methods_that_scale_layers(tmp_path: Path) -> None:
    random_case("falcon-h1").save_pretrained(tmp_path / "source")
    write_tokenizer(tmp_path / "source", 67)
    with pytest.raises(QuantizationError, match=r"awq does not quantize falcon_h1 models; choose trellis, gptq or rtn"):
        quantize(tmp_path / "source", Store(tmp_path / "store"), Recipe.usual("awq", group_size=32), calibration=TEXT)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_products_in_bfloat16_measure_the_same(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    """GPTQ rounds other weights up where statistics differ in their last bits, so what follows is another model."""
    found = []
    for small in (lowered.SMALL, 0):
        monkeypatch.setattr(lowered, "SMALL", small)
        store, recipe = Store(tmp_path / f"{small}"), Recipe(method=method, bits=3, group_size=32)
        info = quantize(tiny_checkpoint, store, recipe, calibration=TEXT, evaluation=TEXT[:300])
        found.append(store.open(info.name))
    exact, fast = found
    assert fast.info.summary.perplexity_before == pytest.approx(exact.info.summary.perplexity_before, rel=0.01)
    if method == "rtn":
        assert fast.info.summary.perplexity_after == pytest.approx(exact.info.summary.perplexity_after, rel=0.01)
    assert exact.losses is not None
    assert fast.losses is not None
    for kind, nats in exact.losses.nats.items():
        assert fast.losses.nats[kind][0] == pytest.approx(nats[0], rel=0.05)


@pytest.mark.parametrize("recipe", [Recipe(bits=3.5), Recipe(method="squeezellm"), Recipe(method="awq-gptq")], ids=str)
def test_a_run_cancelled_in_any_phase_goes_on(run: Run, recipe: Recipe) -> None:
    """Bits of blocks and sensitivities are found before the blocks, and kept."""
    recipe = replace(recipe, group_size=32)
    reports: list[Progress] = []
    expected = run(name="undisturbed", recipe=recipe, progress=reports.append)
    phases = list(dict.fromkeys(report.phase for report in reports))
    early = {3.5: ["allocate"], 4: ["sensitivities"] if recipe.codebook else []}[recipe.bits]
    assert phases == ["check", "tokenizer", *early, "quantize", "verify"]
    assert expected.recipe.block_bits is None if not early or recipe.codebook else len(expected.recipe.block_bits) == 2
    for phase, count in [*((phase, count) for phase in early for count in (1, 2)), ("quantize", 1), ("quantize", 8)]:
        seen: list[str] = []
        with pytest.raises(CancelledError):
            run(
                name="stopped",
                recipe=recipe,
                progress=lambda report: seen.append(report.phase),  # noqa: B023
                cancelled=lambda: seen.count(phase) >= count,  # noqa: B023
            )
    again: list[Progress] = []
    info = run(name="stopped", recipe=recipe, progress=again.append)
    assert content(info.path) == content(expected.path)
    assert not set(early) & {report.phase for report in again}
    assert info.recipe == expected.recipe


def cancel_after_first_block(run: Run, name: str, **options: object) -> None:
    reports: list[Progress] = []
    with pytest.raises(CancelledError):
        run(
            name=name,
            progress=reports.append,
            cancelled=lambda: bool(reports) and reports[-1].unit == "blocks" and reports[-1].done >= 1,
            **options,
        )


@pytest.mark.parametrize("other", ["recipe", "text", "checkpoint"])
def test_unfinished_work_of_another_run_is_not_used(
    run: Run, undisturbed: dict[str, bytes], tmp_path: Path, tiny_checkpoint: Path, other: str
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_checkpoint, folder)
    others: dict[str, dict[str, Any]] = {
        "recipe": {"recipe": Recipe(bits=3, group_size=64)},
        "text": {"calibration": TEXT[::-1]},
    }
    if other == "checkpoint":
        write_checkpoint(folder, seed=1)
    cancel_after_first_block(run, "other", folder=folder, **others.get(other, {}))
    shutil.copytree(tiny_checkpoint, folder, dirs_exist_ok=True)
    assert content(run(folder, name="other").path) == undisturbed


def test_a_damaged_block_of_unfinished_work_is_made_again(
    run: Run, store: Store, undisturbed: dict[str, bytes]
) -> None:
    cancel_after_first_block(run, "damaged")
    block = store.work_folder("damaged") / "block-00000.safetensors"
    data = bytearray(block.read_bytes())
    data[-5] ^= 1
    block.write_bytes(data)
    assert content(run(name="damaged").path) == undisturbed


def test_a_full_disk_is_explained_and_the_next_run_goes_on(
    run: Run, store: Store, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(name="other")
    calls = iter(range(1000))

    def full(descriptor: int) -> None:
        if next(calls) > 30:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable_module.os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full; free some space"):
        run(name="full")
    monkeypatch.undo()
    assert "full" not in store
    assert [info.name for info in store.list()] == ["other"]
    assert not list(store.work_folder("full").glob("*.tmp"))
    store.verify("other")
    assert content(run(name="full").path) == undisturbed


def test_too_little_space_is_noticed_before_the_work(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10, used=9, free=1))
    with pytest.raises(StoreError, match=r"needs [\d.]+ kB more on the disk of .*, and 1 B is free"):
        run()


def test_a_folder_that_cannot_be_written_is_explained(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot create"):
        quantize(tiny_checkpoint, Store(tmp_path / "file" / "store"), Recipe(), calibration=TEXT)


def test_two_processes_do_not_make_the_same_model(run: Run, store: Store) -> None:
    with store.lock("model"), pytest.raises(StoreError, match="another process"):
        run(name="model")
    run(name="model")


def test_checkpoint_without_tokenizer(run: Run, store: Store, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        run(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        run(folder)
    assert list((store.root / ".work").iterdir()) == []


def test_tokenizer_of_another_model(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", vocabulary=32)
    with pytest.raises(CheckpointError, match="do not belong together"):
        run(folder)


def test_a_checkpoint_of_nans_is_refused(run: Run, store: Store, tmp_path: Path) -> None:
    folder = spoil(write_checkpoint(tmp_path / "source"), (3, 4))
    with pytest.raises(QuantizationError, match=r"before layers\.1\.down"):
        run(folder)
    with pytest.raises(QuantizationError, match=r"layers\.1\.gate_up: the weights hold NaN"):
        run(folder, Recipe(method="rtn", residual_bits=0), calibration=None, evaluation=None)
    assert list((store.root / ".work").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": None}, "residuals need a calibration text"),
        ({"calibration": ""}, "the calibration text is too short"),
        ({"evaluation": "x"}, "the evaluation text is too short"),
        ({"calibration": None, "recipe": Recipe(method="gptq", residual_bits=0)}, "gptq needs a calibration text"),
        (
            {"calibration": None, "recipe": Recipe(method="rtn", residual_bits=0, smooth_attention=True)},
            "smooth_attention needs a calibration text",
        ),
    ],
)
def test_texts_that_are_missing_or_too_short(run: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        run(**options)


def test_without_texts_nothing_is_measured(run: Run) -> None:
    info = run(recipe=Recipe(method="rtn", residual_bits=0), calibration=None, evaluation=None)
    assert info.summary.perplexity_before is info.summary.perplexity_after is info.summary.warning is None


def test_foreign_checkpoints_leave_nothing(run: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(UnsupportedModelError):
        run(tmp_path)
    with pytest.raises(CheckpointError):
        run(tmp_path / "nowhere")
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["../up", "a/b/c", "/etc", "", ".hidden", "a--b", "a b", "x" * 200])
def test_names_that_could_leave_the_store_are_refused(run: Run, store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="not a good model name"):
        run(name=name)
    assert not store.root.exists()


def test_what_is_lost_is_said_with_what_would_lose_less() -> None:
    recipe = Recipe(bits=3)
    assert trials(recipe)[:3] == (Trial(k_chunk=0), Trial(k_chunk=16), Trial(k_chunk=64))
    fine = Quality.judge(10.0, (20.0, 11.4, 10.5, 10.2), recipe)
    assert (fine.perplexity_before, fine.perplexity_after, fine.warning) == (10.0, 11.4, None)
    warning = Quality.judge(10.0, (20.0, 15.1, 12.0, 11.0), recipe).warning
    assert warning is not None
    assert "from 10.00 to 15.10 at 3 bits with 16 of 1024 channels compensated" in warning
    assert "64 channels, a larger budget, give 12.00" in warning
    assert "4 bits by plain rounding have 11.00" in warning
    assert "3.5 bits lie between" in warning
    hopeless = Quality.judge(10.0, (20.0, 15.1, 16.0), Recipe(bits=4)).warning
    assert hopeless is not None
    assert "smaller group size" in hopeless
    assert "without compensation" in str(Quality.judge(10.0, (20.0,), Recipe(bits=4, residual_bits=0)).warning)
    broken = Quality.judge(10.0, (float("inf"),) * 4, recipe)
    assert broken.warning is not None
    assert "beyond all numbers" in broken.warning
    assert broken.perplexity_after is None
    assert Quality.judge(None, (), recipe).warning is None


def test_calibration_is_taken_from_all_over_a_long_text(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, long = Checkpoint.open(tiny_checkpoint).spec, TEXT * 4
    monkeypatch.setattr(text_module, "WINDOW", 32)

    def rows(text: str, limit: int, *, spread: bool) -> list[list[int]]:
        batches = token_windows(tiny_checkpoint, spec, text, limit, "calibration", spread=spread)
        return [row for batch in batches for row in batch.tolist()]

    everything = rows(long, 1_000_000, spread=True)
    beginning, spread = rows(long, 128, spread=False), rows(long, 128, spread=True)
    assert len(everything) > 12
    assert beginning == everything[:4]
    assert spread == [everything[i * len(everything) // 4] for i in range(4)]
    assert rows(TEXT[:40], 128, spread=True) == rows(TEXT[:40], 128, spread=False)


@pytest.mark.parametrize(
    ("case", "rotated"), [("qwen3.5-moe", False), ("glm4-flash", False), ("nemotron-h-moe", False), ("qwen3.5", True)]
)
def test_a_block_that_predicts_further_tokens_is_rounded_and_kept_beside_the_model(
    case: str, rotated: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    with_mtp(source, case)
    write_tokenizer(source, 67)
    store = Store(tmp_path / "store")
    recipe = Recipe.usual("qoq", group_size=0, rotate=True) if rotated else Recipe(method="rtn", residual_bits=0)
    if rotated:
        recipe = replace(recipe, reorder=False, smooth_attention=False, smooth_outputs=False, clip=False)
    info = quantize(source, store, recipe, calibration=TEXT if rotated else None, evaluation=None, name="drafts")
    model = StoredModel.open_folder(info.path)
    if rotated:
        assert model.mtp is None
        return
    checkpoint = Checkpoint.open(source).mtp()
    assert checkpoint is not None
    assert model.mtp is not None
    assert model.mtp.spec == checkpoint.spec
    for name in checkpoint.spec.block_linears(0):
        low = model.mtp.linear(name)
        weight = checkpoint.linear(name)[0].float().numpy()
        assert (low.bits, low.residual) == (4, None)
        assert np.abs(dequantize(low) - weight).max() < np.abs(weight).max() / 6, "half a step, after a clip search"
    for name in checkpoint.spec.vector_names():
        assert np.array_equal(model.mtp.vector(name), checkpoint.vector(name).numpy())
    assert model.mtp.linear("head") is not None
    assert 0 < model.mtp_bytes < (info.path / layout.MTP).stat().st_size
    (info.path / layout.MTP).unlink()
    with pytest.raises(StoreError, match=layout.MTP):
        StoredModel.open_folder(info.path)
