"""Sensitivities against autograd through whole models of transformers, one of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import CancelledError, QuantizationError
from models.quantize import fisher
from models.quantize.work import Work
from models.store.durable import private_folder
from tests.close import assert_close
from tests.models.conftest import spoil, write_checkpoint
from tests.models.random_models import SIZES, random_case

CASES = ("llama-biases", "llama3.2", "mistral-window", "qwen2", "qwen3", "phi3-partial", "gemma2")
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
}


def text(seed: int = 0) -> list[torch.Tensor]:
    """Windows as a calibration text gives them: whole ones in batches, and a shorter rest."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SIZES["vocab_size"], shape, generator=generator) for shape in ((3, 14), (2, 14), (1, 6))]


def expected(model: Any, windows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same sums by hooks on the modules of a whole model, float64."""
    model = model.double()
    seen: dict[str, torch.Tensor] = {}

    def listen(name: str) -> Any:
        def after(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            def add(gradient: torch.Tensor) -> None:
                each = torch.einsum("bsn,bsk->nk", gradient.square(), inputs[0].square())
                seen[name] = seen.get(name, torch.zeros(())) + each

            output.register_hook(add)

        return after

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(listen(name))
    for tokens in windows:
        logits = model(tokens).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    found = {"head": seen["lm_head"].detach()}
    for layer in range(SIZES["num_hidden_layers"]):
        for kind, modules in MODULES.items():
            names = [f"model.layers.{layer}.{module}" for module in modules]
            found[f"layers.{layer}.{kind}"] = torch.cat([seen[name] for name in names if name in seen]).detach()
    return found


def work_in(folder: Path) -> Work:
    private_folder(folder)
    return Work(folder)


def everything(work: Work, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: np.array(fisher.load(work, name)) for name in checkpoint.spec.linear_names()}


@pytest.mark.parametrize("case", CASES)
def test_every_layer_has_what_autograd_gives(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher, "_LOGITS", 2000)  # pieces of the vocabulary that do not divide it
    model = random_case(case)
    model.save_pretrained(tmp_path / "checkpoint")
    checkpoint, work = Checkpoint.open(tmp_path / "checkpoint"), work_in(tmp_path / "work")
    shares: list[float] = []
    fisher.sensitivities(checkpoint, text(), work, shares.append)
    wanted = expected(model, text())
    found = everything(work, checkpoint)
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert array.dtype == np.float16
        relative = (wanted[name] / wanted[name].amax(1, keepdim=True)).numpy()
        assert_close(array, relative, "stored half", what=name)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1
    assert sorted(path.name for path in work.folder.iterdir()) == [
        *(f"sensitivity-{layer:05d}.safetensors" for layer in range(3)),
        "sensitivity-head.safetensors",
    ]


def test_a_stopped_run_goes_on_to_the_same_result(tmp_path: Path, tiny_checkpoint: Path) -> None:
    checkpoint, windows = Checkpoint.open(tiny_checkpoint), text()
    whole = work_in(tmp_path / "whole")
    reports = 0

    def count(share: float) -> None:
        nonlocal reports
        reports += 1

    fisher.sensitivities(checkpoint, windows, whole, count)
    work = work_in(tmp_path / "work")
    runs = 0
    while True:  # each run is stopped a little later than what it does anew
        left = 5

        def stop(share: float) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CancelledError("stopped")

        try:
            runs += 1
            fisher.sensitivities(checkpoint, windows, work, stop)
            break
        except CancelledError:
            assert runs < reports
    assert runs > 3
    assert {path.name: path.read_bytes() for path in work.folder.iterdir()} == {
        path.name: path.read_bytes() for path in whole.folder.iterdir()
    }
    fisher.sensitivities(checkpoint, windows, work, lambda share: pytest.fail("what is there is not computed again"))


def test_files_are_discarded_block_by_block_and_counted_before(tmp_path: Path, tiny_checkpoint: Path) -> None:
    checkpoint, work, windows = Checkpoint.open(tiny_checkpoint), work_in(tmp_path / "work"), text()
    most = 0

    def measure(share: float) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in work.folder.iterdir()))

    fisher.sensitivities(checkpoint, windows, work, measure)
    headers = 4096 * (checkpoint.spec.num_layers + 3)
    assert most <= fisher.needed_bytes(checkpoint.spec, sum(tokens.numel() for tokens in windows)) + headers
    fisher.discard(work, "layers.1.o")
    fisher.discard(work, "layers.1.down")
    fisher.discard(work, "head")
    assert [path.name for path in work.folder.iterdir()] == ["sensitivity-00000.safetensors"]


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    folder = spoil(write_checkpoint(tmp_path / "checkpoint"), (3, 5))
    with pytest.raises(QuantizationError, match=r"head: .* NaN or infinity"):
        fisher.sensitivities(Checkpoint.open(folder), text(), work_in(tmp_path / "work"), lambda share: None)
