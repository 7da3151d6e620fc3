"""Quantizing a checkpoint into the store, block by block. Importing this needs no torch; calling `quantize` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from models.errors import MAKING, QuantizationError, check_needed
from models.progress import Cancelled, ProgressCallback, ignore_progress, never_cancelled
from models.recipe import KEPT_UNASKED, AskedMethod, Recipe, chosen_method
from models.store import Store, StoredModelInfo


def for_checkpoint(recipe: Recipe | None, folder: Path, method: AskedMethod = "auto") -> Recipe:
    """The recipe for a checkpoint, once it is at hand: `auto` asks for latent attention, `kept` for its own bits.

    Args:
        recipe: What was asked for; None for `kept`.
        folder: The checkpoint's folder or GGUF file.
        method: As it was asked for.

    Raises:
        ModelError: the checkpoint is damaged or not supported, or the recipe is not possible for it.
    """
    from models.checkpoint import Checkpoint

    if recipe is None:
        return keeping(folder)
    if method == "auto" and recipe.trellis and Checkpoint.open(folder).spec.latent is not None:
        return replace(recipe, method=chosen_method("auto", latent=True))
    return recipe


def keeping(folder: Path) -> Recipe:
    """The recipe that keeps the weights of a checkpoint that are low-bit already.

    Args:
        folder: The checkpoint's folder or GGUF file.

    Raises:
        ModelError: the checkpoint is damaged or not supported, or its weights cannot be kept.
    """
    from models.checkpoint import Checkpoint
    from models.quantize.kept import kept_recipe

    return kept_recipe(Checkpoint.open(folder))


def kept_by_default(folder: Path) -> Recipe | None:
    """The same where a checkpoint is kept unless asked for otherwise; None where it cannot be, or has more bits.

    Raises:
        ModelError: the checkpoint is damaged or not supported.
    """
    try:
        recipe = keeping(folder)
    except QuantizationError:
        return None
    return recipe if recipe.bits <= KEPT_UNASKED else None


def quantize(
    checkpoint_folder: Path,
    store: Store,
    recipe: Recipe,
    *,
    name: str | None = None,
    calibration: str | None = None,
    evaluation: str | None = None,
    force: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Cancelled = never_cancelled,
) -> StoredModelInfo:
    """Make a low-bit model from a checkpoint: a Hugging Face folder, or a GGUF file.

    The work proceeds block by block: the calibration and the evaluation text pass through each block in full
    precision, its matrices are quantized, the evaluation text passes through the low-bit block, and the result is
    written and synced. AWQ's methods first fold scales into the block without changing its function. A killed or
    cancelled run continues after the last finished block when called again with the same arguments; the result is
    byte for byte that of an uninterrupted run. The finished model appears in the store atomically.

    Memory stays below the largest block in float32 + the map of one shard + 1.5 GiB. Methods with second moments take
    4 bytes more for each pair of input channels of the block's linear layers, and those with error feedback another 16
    for each of the widest one (4.3 GB in all for Llama 3.1 8B).

    Args:
        checkpoint_folder: Holds config.json, safetensors and tokenizer files; or a GGUF file, which holds all that.
        store: Where the model goes.
        recipe: How to quantize.
        name: Its name; derived from the folder and the recipe if None.
        calibration: Text for the statistics of salient channels and for the method; up to 2048 tokens of it are used,
            8192 where the method needs it. Round-to-nearest of whole bits without residuals needs none.
        evaluation: Text for the perplexities before and after, as a chat gets them (`models.quantize.quality`); up to
            1024 tokens of it are used. None measures none.
        force: Whether to replace a model of that name.
        progress: Receives reports.
        cancelled: Whether to stop; called between pieces of work.

    Returns:
        The new model.

    Raises:
        UnsupportedModelError: the architecture is not one this program runs.
        CheckpointError: the checkpoint is incomplete or damaged, or has no tokenizer.
        QuantizationError: the recipe, the texts and the checkpoint do not go together.
        StoreError: the name is taken or invalid, or the disk is full or read-only.
        CancelledError: `cancelled` returned True; progress is kept.
    """
    check_needed(MAKING)
    from models.quantize.pipeline import Pipeline

    pipeline = Pipeline(
        checkpoint_folder,
        store,
        recipe,
        calibration=calibration,
        evaluation=evaluation,
        progress=progress,
        cancelled=cancelled,
    )
    return pipeline.run(name, force=force)
