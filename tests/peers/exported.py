"""An exported GGUF file in llama.cpp, beside the stored model that it was written from.

    python -m tests.peers.exported FOLDER --peer-python PYTHON [--residuals]

FOLDER is a stored model. It is exported, llama.cpp (in its own interpreter, see README.md) reads a text of 128 tokens,
and its logits are compared with those of the plain decoder on the same weights. llama.cpp rounds activations to 8 bits,
so the plain decoder is also run with activations rounded like that: the two differences are of one size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 128


def llama(path: Path, tokens: list[int]) -> Any:
    """llama.cpp's logits of every token, float32 [T, V]; runs in the peer's interpreter."""
    import llama_cpp

    from tests.bench.quality.llama_worker import load, start

    start()
    model = load(path, use_extra_bufts=False)  # repacked weights crash on some virtual machines with AMX
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = len(tokens)
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
        batch.seq_id[i][0] = 0
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = (llama_cpp.llama_get_logits_ith(context, i) for i in range(len(tokens)))
    return np.array([np.ctypeslib.as_array(row, (vocabulary,)) for row in rows])


def plain(folder: Path, residuals: bool, tokens: list[int]) -> tuple[Any, Any]:
    """The plain decoder's logits of every token, and those with activations of 8 bits in blocks of 32."""
    import torch

    from models.oracle import Oracle
    from models.store import StoredModel
    from tests.models.restored import Restored

    weights = Restored(StoredModel.open_folder(folder), residuals)
    text = torch.tensor([tokens])

    def rounded(x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
        return ((blocks / scale).round() * scale).flatten(-2)

    exact = Oracle(weights).logits(text)[0].numpy()
    product = torch.nn.functional.linear
    try:
        torch.nn.functional.linear = lambda x, *rest: product(rounded(x), *rest)
        return exact, Oracle(weights).logits(text)[0].numpy()
    finally:
        torch.nn.functional.linear = product


def differences(found: Any, expected: Any) -> str:
    """Root mean square and largest difference in units of the logits' spread, and how often the same token leads."""
    off = (found - expected) / expected.std()
    same = (found.argmax(-1) == expected.argmax(-1)).mean()
    return f"rms {np.sqrt((off**2).mean()):.5f}, largest {np.abs(off).max():.4f}, same first token {100 * same:.0f} %"


def main() -> None:
    """Compare, or answer as the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--residuals", action="store_true")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        np.save(asked.peer / "logits.npy", llama(asked.folder, np.load(asked.peer / "tokens.npy").tolist()))
        return
    from assets import evaluation_text
    from models.export.export import export
    from models.plain_tokenizer import plain_tokenizer
    from models.store import StoredModel

    tokenizer = plain_tokenizer(asked.folder)
    assert tokenizer is not None
    tokens = tokenizer.fast.encode(evaluation_text()[: 20 * TOKENS]).ids[:TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exported.gguf"
        export(StoredModel.open_folder(asked.folder), file, "gguf", residuals=asked.residuals)
        np.save(Path(folder) / "tokens.npy", tokens)
        command = [asked.peer_python, "-m", "tests.peers.exported", str(file), "--peer", folder]
        subprocess.run(command, check=True)
        theirs = np.load(Path(folder) / "logits.npy")
    exact, rounded = plain(asked.folder, asked.residuals, tokens)
    print("llama.cpp beside the plain decoder: ", differences(theirs, exact))
    print("activations of 8 bits beside it:    ", differences(rounded, exact))


if __name__ == "__main__":
    main()
