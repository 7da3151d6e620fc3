"""Peak memory of quantizing: bounded by one block, whatever the model's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.checkpoint import Checkpoint
from models.quantizers import gptq
from models.spec import LAYER_TYPES
from tests.models.conftest import TEXT, write_checkpoint
from tests.models.peak import growth

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

MEASURE = """
import json, re, sys
from pathlib import Path
import torch, transformers, tokenizers
from models.quantize import quantize, scales
from models.quantizers import residual
from models.recipe import Recipe
from models.store import Store

torch.set_num_threads(1)
scales._RATIOS = (1.0,)  # the searches take time, not memory
scales.GRID = residual.GRID = 1
text = Path(sys.argv[3]).read_text()
method = sys.argv[4]
store = Store(Path(sys.argv[2]))
peaks = []
for source in sys.argv[5:] + [sys.argv[1]]:
    quantize(Path(source), store, Recipe(method=method, bits=4), calibration=text, evaluation=text)
    # Not ru_maxrss: a child inherits that from the process which started it.
    peaks.append(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
print(json.dumps(peaks))
"""


@linux
def test_error_feedback_is_prepared_in_place() -> None:
    """In bytes for each pair of channels, the Hessian itself not counted."""
    x = np.random.default_rng(0).standard_normal((64, 3000), np.float32)
    hessian = x.T @ x
    gptq.feedback(hessian[:64, :64].copy())
    assert growth(lambda: gptq.feedback(hessian)) <= 17 * 3000**2


@pytest.mark.slow
@linux
def test_peak_is_one_block_and_one_shard(tmp_path: Path) -> None:
    """Against the peak of a tiny model in the same process, so that libraries and texts are not counted.

    By AWQ, which has all that rounding to nearest has, and moments. The full-precision weights are 28 blocks of 15.7 MB
    (float32) in 10 shards: keeping them all would cost 440 MB.
    """
    shape = {"hidden": 512, "intermediate": 2048, "layers": 28, "shards": 10, "tied": False, "vocabulary": 4096}
    folder = write_checkpoint(tmp_path / "large", **shape)
    tiny = write_checkpoint(tmp_path / "tiny")
    (tmp_path / "text").write_text(TEXT)
    arguments = [str(folder), str(tmp_path / "store"), str(tmp_path / "text"), "awq", str(tiny)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # what each thread's own heap keeps is chance
        capture_output=True,
        text=True,
        check=True,
    )
    tiny_peak, large_peak = json.loads(done.stdout)
    checkpoint = Checkpoint.open(folder)
    weights = {name: checkpoint.linear(name)[0].numel() for name in checkpoint.spec.linear_names()}
    block = 4 * sum(weights[f"layers.0.{kind}"] for kind in LAYER_TYPES)
    shard = max(path.stat().st_size for path in checkpoint.files.weights)
    whole = 4 * sum(weights.values())
    allowance = 128 * 2**20  # activations of four windows and the pieces in work; far under the 1.5 GiB promised
    moments = sum(4 * checkpoint.spec.linear_shape(kind)[1] ** 2 for kind in LAYER_TYPES)
    levels = 3 * 4 * 512 * 2048 * 4  # what three levels of compensation leave of a batch of four windows, at `down`
    limit = block + block // 2 + shard + moments + levels + allowance  # half a block more: operands in bfloat16
    assert large_peak - tiny_peak <= limit
    assert limit < 0.6 * whole, "the limit would not notice a model kept whole"
