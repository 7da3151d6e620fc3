"""The bundled low-bit model, made from the bundled checkpoint: `python -m assets.demo_model.pack`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from assets import demo_checkpoint_path, demo_path
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import Split
from assets.demo_model.vocabulary import END, ROLES
from models.progress import Progress
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel, StoredModelInfo

NAME = "demo"
CALIBRATION_CONVERSATIONS, EVALUATION_CONVERSATIONS = 80, 40


def dialogues(split: Split, count: int) -> str:
    """Conversations as the chat template writes them, one after another.

    The model knows nothing but its own dialogues, so statistics and perplexity over ordinary prose would say nothing.

    Args:
        split: `train` for calibration, `held_out` for perplexity.
        count: Number of conversations.
    """
    writer = Writer(split, seed=0)
    messages = [message for index in range(count) for message in writer.conversation(index).messages()]
    return "".join(f"{ROLES[message['role']]}{message['content']}{END}" for message in messages)


def pack(checkpoint: Path, target: Path, *, bits: int = 4) -> StoredModelInfo:
    """Quantize a checkpoint and put the result in a folder of its own, which replaces the target.

    Args:
        checkpoint: Hugging Face folder.
        target: Folder to make, in the store's layout.
        bits: Bits of the blocks' weights.

    Returns:
        What is known of the new model.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".packing-") as scratch:
        store = Store(Path(scratch))
        quantize(
            checkpoint,
            store,
            Recipe(method="rtn", bits=bits, group_size=128),
            name=NAME,
            calibration=dialogues("train", CALIBRATION_CONVERSATIONS),
            evaluation=dialogues("held_out", EVALUATION_CONVERSATIONS),
            progress=_Teller(),
        )
        if target.exists():
            shutil.rmtree(target)
        shutil.move(store.path(NAME), target)
    for path in (target, *target.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    model = StoredModel.open_folder(target, NAME)
    model.verify()
    return model.info


class _Teller:
    """Writes each new message of the progress on a line of its own."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, progress: Progress) -> None:
        if progress.message != self._last:
            self._last = progress.message
            sys.stderr.write(f"{progress.message}\n")


def main(arguments: list[str] | None = None) -> None:
    """Command line of the packing."""
    parser = argparse.ArgumentParser(prog="python -m assets.demo_model.pack", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=demo_checkpoint_path(), help="Hugging Face folder")
    parser.add_argument("--output", type=Path, default=demo_path(), help="folder to make")
    parser.add_argument("--bits", type=int, default=4, help="bits of the blocks' weights")
    given = parser.parse_args(arguments)
    info = pack(given.checkpoint, given.output, bits=given.bits)
    sys.stderr.write(f"{given.output}: {info}\n")


if __name__ == "__main__":
    main()
