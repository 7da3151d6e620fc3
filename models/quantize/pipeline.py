"""The quantization pipeline: check, tokenizer, blocks, head, verification, publication in the store."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.checkpoint import Checkpoint
from models.errors import CancelledError, CheckpointError, QuantizationError, StoreError
from models.hub.meter import bytes_text, free_text
from models.mtp import mtp_recipe
from models.oracle import Oracle
from models.origins import Origins
from models.progress import Cancelled, Progress, ProgressCallback
from models.quantize import copies, fisher
from models.quantize.allocation import allocate
from models.quantize.calibration import InputStatistics, KeyMoments
from models.quantize.kept import kept_linear, rounded
from models.quantize.lowered import LoweredLinear, products
from models.quantize.matrix import quantize_matrix, stored_tensors
from models.quantize.outer import outer_tensors, quantize_outer
from models.quantize.qoq import prepare
from models.quantize.quality import Quality, finer, summarize, trials
from models.quantize.rotated import RotatedCheckpoint
from models.quantize.scales import scale_block, smooth_attention
from models.quantize.streams import Batches, Streams, run_low
from models.quantize.text import (
    EVALUATION_TOKENS,
    LAST_TOKENIZER_FILE,
    calibration_limit,
    convert_tokenizer,
    token_windows,
)
from models.quantize.work import Work, identity_of, read_source, recipe_file
from models.quantize.working import WorkingBlock
from models.quantizers import MATRIX_BY_MATRIX, SCALED, SECOND_MOMENTS, SENSITIVITIES
from models.recipe import LARGEST_BITS, Recipe
from models.spec import expert_of
from models.store import Store, StoredModelInfo, layout
from models.store.durable import remove_folder
from models.store.manifest import Manifest, json_bytes, verify
from models.store.store import check_name, default_name
from models.store.tensors import Array, MappedTensors

logger = logging.getLogger(__name__)
_SENSITIVITIES = "sensitivities"
_BETWEEN = 10
"""Hidden states are saved again after so many times as long as saving them took."""


class Pipeline:
    """One run of `models.quantize.quantize`; see there for the arguments."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        recipe: Recipe,
        *,
        calibration: str | None,
        evaluation: str | None,
        progress: ProgressCallback,
        cancelled: Cancelled,
    ) -> None:
        if calibration is None and recipe.residual_bits:
            raise QuantizationError("residuals need a calibration text; give one, or choose residual_bits 0")
        if calibration is None and recipe.method in SECOND_MOMENTS | SENSITIVITIES:
            raise QuantizationError(f"{recipe.method} needs a calibration text; give one, or choose rtn")
        if calibration is None and recipe.mixed and recipe.block_bits is None:
            raise QuantizationError(
                f"{recipe.bits:g} bits on average need a calibration text; give one, or choose 3 or 4"
            )
        if calibration is None and recipe.smooth_attention:
            raise QuantizationError("smooth_attention needs a calibration text; give one, or leave it out")
        if recipe.kept:
            calibration = evaluation = None
        checkpoint = Checkpoint.open(folder)
        spec = checkpoint.spec
        able = MATRIX_BY_MATRIX if spec.latent is not None else ("trellis", *MATRIX_BY_MATRIX)
        special = spec.v_norm or "both" in spec.mixers or spec.mixture is not None or spec.latent is not None
        if special and not recipe.kept and recipe.method not in able:
            what = "mixtures of experts" if spec.mixture is not None else f"{spec.family} models"
            rest = f"choose {', '.join(able[:-1])} or {able[-1]}"
            raise QuantizationError(f"{recipe.method} does not quantize {what}; {rest}")
        shared = spec.wide_heads is not None or "shared" in spec.mixers
        if recipe.smooth_attention and (shared or spec.latent is not None):
            why = "a norm follows them" if spec.latent is not None else "blocks have them in two widths or share them"
            raise QuantizationError(
                f"keys of {spec.family} models cannot be smoothed, because {why}; leave the step out"
            )
        self.checkpoint = RotatedCheckpoint.of(checkpoint) if recipe.rotate else checkpoint
        self.store = store
        self.recipe = recipe
        self.texts = (calibration, evaluation)
        self.progress = progress
        self.cancelled = cancelled
        self._next_keep = 0.0

    def run(self, name: str | None, *, force: bool) -> StoredModelInfo:
        name = default_name(self.checkpoint.path, self.recipe) if name is None else check_name(name)
        self._check_free(name, force=force)
        with self.store.lock(name):
            self._check_free(name, force=force)
            work = Work(self.store.work_folder(name))
            try:
                self._begin(work)
                if not work.complete():
                    self._make(name, work)
            except (CheckpointError, QuantizationError):
                remove_folder(work.folder)  # trying again would fail again
                raise
            self._publish(name, work)
        info = self.store.info(name)
        Origins(self.store).remember(info, self.checkpoint.path)
        return info

    def _check_free(self, name: str, *, force: bool) -> None:
        if name in self.store and not force:
            raise StoreError(
                f"the store has a model {name!r} already; replace it with --force or choose another name with --name"
            )

    def _begin(self, work: Work) -> None:
        """Find out what is to be made and whether the work folder holds a part of it."""
        calibration, evaluation = self.texts
        source = read_source(
            self.checkpoint.files,
            work.state(),
            lambda done, total: self._report("check", done, total, "bytes", "Reading the checkpoint"),
        )
        self.identity = identity_of(self.checkpoint.files, source, self.recipe, calibration, evaluation)
        work.begin(self.identity, source.stamps)

    def _make(self, name: str, work: Work) -> None:
        self._check_space(name, work)
        self._save_small_files(work)
        if self.recipe.types is not None:
            self._keep_weights(work, self.recipe.types)
            return
        calibration, evaluation = self._tokens(work)
        self._allocate(work, calibration)
        self._sensitivities(work, calibration)
        layer, streams = self._resume(work, calibration, evaluation)
        for index in range(layer, self.checkpoint.spec.num_layers):
            self._block(work, index, streams)
        quality = self._outer(work, streams, evaluation)
        self._mtp(work)
        self._describe(work, quality)

    def _describe(self, work: Work, quality: Quality) -> None:
        files = work.entries()
        summary = summarize(self.checkpoint.spec, self.recipe, quality, files)
        Manifest(summary=summary, files=files).write(work.folder)

    def _keep_weights(self, work: Work, types: Mapping[str, str]) -> None:
        """Write weights as the checkpoint has them."""
        checkpoint, spec = self.checkpoint, self.checkpoint.spec
        for layer in range(spec.num_layers):
            self._report("quantize", layer, spec.num_layers + 1, "blocks", f"Block {layer + 1} of {spec.num_layers}")
            if work.has(layout.block_file(layer)):
                continue
            names = (*spec.block_vectors(layer), *spec.routers(layer))
            tensors: dict[str, Array] = {name: checkpoint.vector(name).numpy() for name in names}
            if spec.mixture is not None and spec.has_experts(layer):
                tensors[layout.expert_tokens(layer)] = np.zeros(spec.mixture.num_experts, np.int32)
            for name in spec.block_linears(layer):
                tensors |= stored_tensors(kept_linear(checkpoint, name, types[name]))
            work.save_tensors(layout.block_file(layer), tensors)
        outer = {**outer_tensors(checkpoint), "norm": checkpoint.vector("norm").numpy()}
        work.save_tensors(layout.OUTER, {**outer, **stored_tensors(kept_linear(checkpoint, "head", types["head"]))})
        quality = Quality(perplexity_before=None, perplexity_after=None, warning=rounded(checkpoint, types))
        work.save(layout.RECIPE, [recipe_file(self.identity, quality.to_json())])
        self._mtp(work)
        self._describe(work, quality)

    def _mtp(self, work: Work) -> None:
        """Round the block that predicts a further token, if the checkpoint has one that fits."""
        if work.has(layout.MTP) or self.recipe.rotate:  # rotated, the model's stream is not what the block reads
            return
        try:
            checkpoint = self.checkpoint.mtp()
        except CheckpointError as error:
            logger.warning("the block that predicts further tokens is left out: %s", error)
            return
        if checkpoint is None:
            return
        spec, recipe, total = checkpoint.spec, mtp_recipe(self.recipe), self.checkpoint.spec.num_layers + 1
        tensors: dict[str, Array] = {
            name: checkpoint.vector(name).numpy() for name in (*spec.vector_names(), *spec.router_names())
        }
        if spec.mixture is not None:
            tensors[layout.expert_tokens(0)] = np.zeros(spec.mixture.num_experts, np.int32)

        def watch() -> None:
            self._report("quantize", total, total, "blocks", "The block that predicts further tokens")

        for name in spec.block_linears(0):
            weight, bias = checkpoint.linear(name)
            seen = InputStatistics.empty(weight.shape[1])
            tensors |= stored_tensors(quantize_matrix(name, weight, bias, recipe, seen, watch))
        work.save_tensors(layout.MTP, tensors)

    def _check_space(self, name: str, work: Work) -> None:
        spec, recipe = self.checkpoint.spec, self.recipe
        if recipe.mixed and recipe.block_bits is None:  # not known yet: at most this
            recipe = replace(recipe, bits=LARGEST_BITS)
        needed = sum(
            dtype.itemsize * math.prod(shape)
            for file in layout.tensor_files(spec)
            if not work.has(file)
            for dtype, shape in layout.file_tensors(spec, recipe, file).values()
        )
        if recipe.method in SENSITIVITIES and not work.marked(_SENSITIVITIES):
            needed += fisher.needed_bytes(spec, calibration_limit(recipe.method))
        free = shutil.disk_usage(work.folder).free
        if needed > free:
            raise StoreError(
                f"{name} needs {bytes_text(needed)} more on the disk of {self.store.root}, and "
                f"{free_text(free, needed)} is free; free some space and run the same command again"
            )

    def _save_small_files(self, work: Work) -> None:
        files = self.checkpoint.files
        for file, content in files.configuration.items():
            if not work.has(file):
                work.save(file, [content])
        if not work.has(LAST_TOKENIZER_FILE):
            self._report("tokenizer", 0, 1, "files", "Converting the tokenizer")
            if files.tokenizer is None:
                convert_tokenizer(files.path, work.folder, lambda file, content: work.save(file, [content]))
            else:
                for file, content in files.tokenizer().items():
                    work.save(file, [content])

    def _tokens(self, work: Work) -> tuple[Batches, Batches]:
        spec, (calibration, evaluation) = self.checkpoint.spec, self.texts
        windows: list[Batches] = []
        for text, limit, purpose in (
            (calibration, calibration_limit(self.recipe.method), "calibration"),
            (evaluation, EVALUATION_TOKENS, "evaluation"),
        ):
            spread = purpose == "calibration"
            found = [] if text is None else token_windows(work.folder, spec, text, limit, purpose, spread=spread)
            windows.append(found)
        return windows[0], windows[1]

    def _allocate(self, work: Work, calibration: Batches) -> None:
        if not self.recipe.mixed or self.recipe.block_bits is not None:
            return
        found = work.block_bits()
        if found is None:
            watch = self._shares("allocate", "Finding the blocks that need 4 bits")
            found = allocate(self.checkpoint, self.recipe, calibration, watch)
            work.save_block_bits(found)
        self.recipe = replace(self.recipe, block_bits=found)

    def _sensitivities(self, work: Work, calibration: Batches) -> None:
        """Find what each weight does to the loss, for a method that needs it."""
        if self.recipe.method not in SENSITIVITIES or work.marked(_SENSITIVITIES):
            return
        watch = self._shares(_SENSITIVITIES, "Finding the weights that matter most")
        fisher.sensitivities(self.checkpoint, calibration, work, watch)
        work.mark(_SENSITIVITIES)

    def _sensitivity(self, work: Work, name: str) -> npt.NDArray[np.floating] | None:
        """Of the loss to the weights of a linear layer, where the method needs it."""
        if self.recipe.method not in SENSITIVITIES:
            return None
        return fisher.load(work, name)

    def _shares(self, phase: str, message: str) -> Callable[[float], None]:
        """Report a phase whose work tells its share that is done."""
        blocks = float(self.checkpoint.spec.num_layers + 1)
        return lambda share: self._report(phase, share * blocks, blocks, "blocks", message)

    def _resume(self, work: Work, calibration: Batches, evaluation: Batches) -> tuple[int, Streams]:
        found = work.resume()
        if found is None:
            copied = copies.start(self.checkpoint, calibration) if self.recipe.residual_bits else []
            return 0, Streams.start(self.checkpoint, calibration, evaluation, copied, trials(self.recipe))
        layer, tensors = found
        return layer, Streams.load(tensors)

    def _block(self, work: Work, layer: int, streams: Streams) -> None:
        checkpoint, done = self.checkpoint, 0
        names = checkpoint.spec.block_linears(layer)

        def step() -> None:
            total = checkpoint.spec.num_layers + 1
            message = f"Block {layer + 1} of {checkpoint.spec.num_layers}"
            share = min(1.0, done / (len(names) + 2))  # full-precision pass, each linear layer, low-bit pass
            self._report("quantize", layer + share, total, "blocks", message)

        step()
        working = WorkingBlock(checkpoint, layer)
        clips = None
        if self.recipe.per_token:
            clips = prepare(working, streams, self.recipe, step)
        elif self.recipe.smooth_attention and checkpoint.spec.mixer(layer) == "attention":
            smooth_attention(working, streams.largest_keys(working, layer, step))
        if self.recipe.method in SCALED:
            scale_block(working, streams.observe(working, layer, self.recipe, step), self.recipe, step)
        keys = KeyMoments(checkpoint.spec, layer)
        dtype = products(checkpoint.spec)
        oracle = Oracle(working, resident=False, products=dtype)
        statistics, experts = streams.run_full(oracle, layer, self.recipe, keys, step)
        linears: dict[str, LoweredLinear] = {}
        compared: dict[str, LoweredLinear] = {}
        other = finer(self.recipe) if streams.finer else None
        for name in names:
            done += 1
            weight, bias = working.linear(name)
            recipe, sensitivity = self.recipe, self._sensitivity(work, name)
            if experts is None or expert_of(name) is None:
                seen = statistics.pop(name)
            else:
                seen, recipe = experts.statistics(name)
            own = clips if name.endswith(".qkv") else None
            packed = quantize_matrix(name, weight, bias, recipe, seen, step, sensitivity, own)
            linears[name] = LoweredLinear(packed, dtype)
            if other is not None:
                compared[name] = LoweredLinear(quantize_matrix(name, weight, bias, other, seen, step), dtype)
            del weight, seen
        done += 1
        working.release()
        copies.advance(oracle, layer, linears, streams.copies, step)
        oracle = Oracle(working, resident=False, products=dtype)
        for batches, own_linears, is_finer in ((streams.low, linears, False), (streams.finer, compared, True)):
            tried = [trial for trial in trials(self.recipe) if trial.finer == is_finer]
            run_low(oracle, layer, batches, own_linears, tried, step)
            for lowered in own_linears.values():
                lowered.release()
        vectors = (*checkpoint.spec.block_vectors(layer), *checkpoint.spec.routers(layer))
        tensors: dict[str, Array] = {name: working.vector(name).numpy() for name in vectors}
        if experts is not None:
            tensors[layout.expert_tokens(layer)] = experts.tokens
        for lowered in linears.values():
            tensors |= stored_tensors(lowered.linear)
        tensors |= keys.tensors()
        work.save_tensors(layout.block_file(layer), tensors)
        self._keep(work, layer + 1, streams)
        if self.recipe.method in SENSITIVITIES:
            fisher.discard(work, f"layers.{layer}")

    def _keep(self, work: Work, layer: int, streams: Streams) -> None:
        """Save the hidden states before a block, unless that would take more than a tenth of the time."""
        now = time.monotonic()
        if now < self._next_keep and layer < self.checkpoint.spec.num_layers:
            return
        work.save_streams(layer, streams.tensors())
        saved = time.monotonic()
        self._next_keep = saved + _BETWEEN * (saved - now)

    def _outer(self, work: Work, streams: Streams, evaluation: Batches) -> Quality:
        recorded = work.saved_recipe().get("quality")
        if recorded is not None and work.has(layout.OUTER):
            return Quality(**recorded)
        layers = self.checkpoint.spec.num_layers

        def watch(share: float) -> None:
            self._report("quantize", layers + share, layers + 1, "blocks", "Output head and perplexity")

        sensitivity = self._sensitivity(work, "head")
        outer = quantize_outer(
            self.checkpoint, self.recipe, streams, evaluation, lambda share: watch(share / 2), sensitivity
        )
        if streams.copies:
            found = copies.losses(
                self.checkpoint, outer.head, outer.norm, streams.copies, lambda share: watch((1 + share) / 2)
            )
            work.save(layout.LOSSES, [json_bytes(found.to_json())])
        if outer.reference:
            work.save_tensors(layout.REFERENCE, outer.reference)
        work.save_tensors(layout.OUTER, outer.tensors)
        quality = Quality.judge(outer.perplexity_before, outer.perplexities, self.recipe)
        quality = quality.with_experts(self._experts_tokens(work), self.recipe)
        quality = quality.with_source(self.checkpoint.files.types)
        made = {**self.identity, "recipe": self.recipe.to_json()}
        work.save(layout.RECIPE, [recipe_file(made, quality.to_json())])
        return quality

    def _experts_tokens(self, work: Work) -> list[int]:
        found: list[int] = []
        for layer in filter(self.checkpoint.spec.has_experts, range(self.checkpoint.spec.num_layers)):
            file = MappedTensors(work.folder / layout.block_file(layer))
            found += file[layout.expert_tokens(layer)].tolist()
        return found

    def _publish(self, name: str, work: Work) -> None:
        """Clean up, read everything once more, and move the model into its place."""
        manifest = work.finish()
        try:
            verify(
                work.folder,
                manifest,
                lambda done, total: self._report("verify", done, total, "bytes", "Verifying what was written"),
            )
        except StoreError as error:
            remove_folder(work.folder)
            raise StoreError(f"{name} was written, but reads back differently; check the disk ({error})") from error
        self.store.publish(name)
        total = float(self.checkpoint.spec.num_layers + 1)
        self.progress(Progress(phase="quantize", done=total, total=total, unit="blocks", message=f"{name} is ready"))

    def _report(self, phase: str, done: float, total: float, unit: str, message: str) -> None:
        if self.cancelled():
            raise CancelledError("stopped; the same command continues where it stopped")
        self.progress(Progress(phase=phase, done=done, total=total, unit=unit, message=message))
