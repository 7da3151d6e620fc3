"""llama.cpp's logits beside this program's, on the same file: exported models, and every architecture that GGUF has.

    python -m tests.lab.logits --peer-python PYTHON [CASE ...]
    python -m tests.lab.logits --peer-python PYTHON --stored STORE/NAME [--residuals]

The cases are small random models in float32, as `tests/models/gguf/test_gguf_checkpoint.py` writes them, in the
full-precision decoder. A stored model is exported, and a text of 128 tokens compared with the plain decoder on the same
weights; llama.cpp rounds activations to 8 bits, so the plain decoder also runs with activations rounded like that: the
two differences are of one size. Interpreters with llama.cpp: see llama.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assets import evaluation_text
from models.checkpoint import Checkpoint
from models.export.export import export
from models.oracle import Oracle
from models.plain_tokenizer import plain_tokenizer
from models.store import StoredModel
from tests.lab.compare import job, peer
from tests.lab.measure import Worker
from tests.lab.store import columns, parser
from tests.models.gguf.making import SIZES, random_model, write_gguf
from tests.models.gguf.test_gguf_checkpoint import CASES
from tests.models.restored import Restored

_AS_WIDE = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    **dict.fromkeys(("qwen3.5", "qwen3.5-even", "qwen3.5-moe"), _AS_WIDE),
}
"""What llama.cpp does otherwise: it cuts YaRN's borders, and takes a delta rule's keys and values for equally wide."""


def differences(found: Any, expected: Any) -> dict[str, float]:
    """In units of the logits' spread; and how often the same token leads."""
    off = (found - expected) / expected.std()
    same = 100 * float((found.argmax(-1) == expected.argmax(-1)).mean())
    return {"rms": float(np.sqrt((off**2).mean())), "largest": float(np.abs(off).max()), "same token, %": same}


def theirs(llama: Worker, file: Path, tokens: Any) -> Any:
    """llama.cpp's logits of every token, float32 [T, V]."""
    np.save(file.with_name("tokens.npy"), tokens)
    job(llama, "logits", str(file), str(file.with_name("tokens.npy")), str(file.with_name("logits.npy")))
    return np.load(file.with_name("logits.npy"))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations of 8 bits in blocks of 32."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
    return ((blocks / scale).round() * scale).flatten(-2)


def exported(folder: Path, residuals: bool, python: str, scratch: Path) -> list[dict[str, Any]]:
    """A stored model as GGUF, beside the plain decoder on the same weights."""
    model, tokenizer = StoredModel.open_folder(folder), plain_tokenizer(folder)
    assert tokenizer is not None
    tokens = tokenizer.fast.encode(evaluation_text()[:2560]).ids[:128]
    export(model, scratch / "exported.gguf", "gguf", residuals=residuals)
    weights, text, product = Restored(model, residuals), torch.tensor([tokens]), torch.nn.functional.linear
    exact = Oracle(weights).logits(text)[0].numpy()
    try:
        torch.nn.functional.linear = lambda x, *rest: product(rounded(x), *rest)
        coarse = Oracle(weights).logits(text)[0].numpy()
    finally:
        torch.nn.functional.linear = product
    rows = [("activations of 8 bits", coarse), ("llama.cpp", theirs(peer(python), scratch / "exported.gguf", tokens))]
    return [{"model": folder.name, "beside the plain decoder": name, **differences(own, exact)} for name, own in rows]


def architecture(case: str, python: str, scratch: Path) -> dict[str, Any]:
    """A random model of one architecture; a process of its own reads it, for llama.cpp may refuse a file."""
    family, changes = CASES[case]
    file = write_gguf(scratch / "model.gguf", random_model(family, **{**changes, **CHANGES.get(case, {})}))
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 23), generator=torch.Generator().manual_seed(0))
    ours = Oracle(Checkpoint.open(file)).logits(tokens)[0].numpy()
    try:
        return {"model": case, **differences(theirs(peer(python), file, tokens[0].numpy()), ours)}
    except RuntimeError:
        return {"model": case, "refused": "by llama.cpp"}


def main() -> None:
    """Compare and print."""
    options = parser(__doc__)
    options.add_argument("cases", nargs="*", metavar="CASE", help="some of them; all unless given")
    options.add_argument("--peer-python", required=True, help="interpreter that has llama-cpp-python")
    options.add_argument("--stored", type=Path, help="a stored model, instead of the cases")
    options.add_argument("--residuals", action="store_true", help="export it with its residuals added")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.stored:
            rows = exported(given.stored, given.residuals, given.peer_python, Path(folder))
        else:
            rows = [architecture(case, given.peer_python, Path(folder)) for case in given.cases or CASES]
    print(columns(rows))


if __name__ == "__main__":
    main()
