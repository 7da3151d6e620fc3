"""The diagonal of the Fisher information, token by token: how sensitive the loss is to an error of each weight.

With x_t the input of a linear layer at token t and δ_t the gradient of the summed next-token cross-entropy by its
output there, F[n, k] = Σ_t δ_t[n]² x_t[k]². One pass forwards keeps the input of every block in the work folder; then
the blocks are gone through backwards, each is run again with autograd, and the gradient by its input is handed on to
the block before. In memory are one block's weights and sensitivities, and the hidden states of the text twice. Every
block and the head get a file of their own, relative to each row's largest number; a killed run goes on from them.

Source: Kim et al. 2024 (SqueezeLLM), §4.1 (diagonal Fisher in place of the Hessian).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError, StoreError
from models.oracle import Oracle, capped
from models.quantize.streams import Batches, normed
from models.quantize.work import Work
from models.spec import LAYER_TYPES, ModelSpec
from models.store.durable import write_file
from models.store.tensors import Array, MappedTensors, PiecewiseTensor, tensor_file

_SENSITIVITY, _INPUT, _GRADIENT = "sensitivity", "fisher-input", "fisher-gradient"
_LOGITS = 1 << 24
"""Maximum number of logits in memory."""
_BACKWARD = 3
"""Cost of a block's backward pass (recomputation, gradients, squares) in units of a forward pass."""


def sensitivities(checkpoint: Checkpoint, windows: Batches, work: Work, watch: Callable[[float], None]) -> None:
    """Find the sensitivities of all linear layers, for `load`.

    Args:
        checkpoint: The full-precision model.
        windows: int64 [B, S] token windows of the calibration text, S >= 2.
        work: The work folder, which may have results of a killed run.
        watch: Called with the share that is done; may raise to stop.
    """
    run = _Run(checkpoint, windows, work, watch)
    layers = checkpoint.spec.num_layers
    if not run.missing():
        run.clean()
        return
    begun = run.latest(_GRADIENT, range(layers + 1))
    if begun is None:
        run.forward()
        run.head()
        begun = layers
    for layer in reversed(range(begun)):
        run.backward(layer)
    run.clean()


def load(work: Work, name: str) -> npt.NDArray[np.float16]:
    """Sensitivities of a linear layer, float16 [N, K] mapped from its file; the largest of every row is 1."""
    array: npt.NDArray[np.float16] = MappedTensors(_path(work, _owner(name)))[name]
    return array


def discard(work: Work, name: str) -> None:
    """Remove the file of the block that the linear layer `name` belongs to (or of the head), if it is there."""
    _path(work, _owner(name)).unlink(missing_ok=True)


def needed_bytes(spec: ModelSpec, tokens: int) -> int:
    """Most bytes that `sensitivities` takes on the disk for a text of so many tokens."""
    weights = sum(math.prod(spec.linear_shape(name)) for name in spec.linear_names())
    return 2 * weights + 4 * (spec.num_layers + 3) * tokens * spec.hidden_size


def _owner(name: str) -> str:
    return "head" if name == "head" else f"{int(name.split('.')[1]):05d}"


def _path(work: Work, owner: str, kind: str = _SENSITIVITY) -> Path:
    return work.folder / f"{kind}-{owner}.safetensors"


class _Run:
    """One run of `sensitivities`; see there for the arguments."""

    def __init__(self, checkpoint: Checkpoint, windows: Batches, work: Work, watch: Callable[[float], None]) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.windows = windows
        self.work = work
        self._watch = watch
        block = sum(math.prod(self.spec.linear_shape(kind)) for kind in LAYER_TYPES)
        self._head_cost = (_BACKWARD + 1) * math.prod(self.spec.linear_shape("head")) / block
        self._total = (_BACKWARD + 1) * self.spec.num_layers + self._head_cost

    def missing(self) -> list[str]:
        owners = [*(f"{layer:05d}" for layer in range(self.spec.num_layers)), "head"]
        return [owner for owner in owners if not _readable(_path(self.work, owner))]

    def latest(self, kind: str, layers: range) -> int | None:
        """The first of `layers` whose hidden states of that kind are there."""
        return next((layer for layer in layers if _readable(self._states(kind, layer))), None)

    def clean(self) -> None:
        for kind in (_INPUT, _GRADIENT):
            for path in self.work.folder.glob(f"{kind}-*"):
                path.unlink(missing_ok=True)

    def forward(self) -> None:
        """Keep the input of every block, and of the final norm."""
        layers = self.spec.num_layers
        first = self.latest(_INPUT, range(layers, -1, -1))
        if first is None:
            self._save(_INPUT, 0, [self.checkpoint.embedded(tokens).to(torch.float32) for tokens in self.windows])
            first = 0
        states = self._load(_INPUT, first)
        oracle = Oracle(self.checkpoint, resident=False)
        for layer in range(first, layers):
            for index, x in enumerate(states):
                self._report(layer + index / len(states))
                states[index] = oracle.block(layer, x)
            self._save(_INPUT, layer + 1, states)

    def head(self) -> None:
        layers = self.spec.num_layers
        states = self._load(_INPUT, layers)
        norm = self.checkpoint.vector("norm")
        head = _Head(
            torch.cat([normed(x[:, :-1], norm, self.spec.norm_eps).flatten(0, 1) for x in states]),
            torch.cat([tokens[:, 1:].flatten() for tokens in self.windows]),
            self.checkpoint.linear("head")[0],
            lambda share: self._report(layers + share * self._head_cost),
            self.spec.logit_cap,
        )
        shape = self.spec.linear_shape("head")
        tensor = PiecewiseTensor(dtype=np.dtype(np.float16), shape=shape, pieces=head.pieces)
        write_file(_path(self.work, "head"), tensor_file({"head": tensor}))
        gradients, start = [], 0
        for x in states:
            count = x.shape[0] * (x.shape[1] - 1)
            x.requires_grad_()
            y = normed(x[:, :-1], norm, self.spec.norm_eps)
            (gradient,) = torch.autograd.grad(y, x, head.gradient[start : start + count].view_as(y))
            gradients.append(gradient)
            start += count
        self._save(_GRADIENT, layers, gradients)
        self._states(_INPUT, layers).unlink()

    def backward(self, layer: int) -> None:
        layers = self.spec.num_layers
        states, gradients = self._load(_INPUT, layer), self._load(_GRADIENT, layer + 1)
        names = list(self.spec.block_linears(layer))
        sums = {name: torch.zeros(self.spec.linear_shape(name)) for name in names}

        def add(name: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
            squares = gradient.flatten(0, -2).square()
            sums[name].addmm_(squares.T, x.detach().flatten(0, -2).square())

        def trace(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
            y.register_hook(partial(add, name, x))  # type: ignore[no-untyped-call]

        oracle = Oracle(self.checkpoint, resident=False, trace=trace)
        for index, x in enumerate(states):
            done = layers + self._head_cost + _BACKWARD * (layers - 1 - layer + index / len(states))
            self._report(done)
            y = oracle.block(layer, x.requires_grad_())
            (gradients[index],) = torch.autograd.grad(y, x, gradients[index])
        found = {name: _relative(sums.pop(name), name) for name in list(sums)}
        write_file(_path(self.work, f"{layer:05d}"), tensor_file(found))
        if layer:
            self._save(_GRADIENT, layer, gradients)
        self._states(_GRADIENT, layer + 1).unlink()
        self._states(_INPUT, layer).unlink()

    def _states(self, kind: str, layer: int) -> Path:
        return _path(self.work, f"{layer:05d}", kind)

    def _save(self, kind: str, layer: int, states: Batches) -> None:
        write_file(self._states(kind, layer), tensor_file({str(index): x.numpy() for index, x in enumerate(states)}))

    def _load(self, kind: str, layer: int) -> Batches:
        file = MappedTensors(self._states(kind, layer))
        return [torch.from_numpy(np.array(file[str(index)])) for index in range(len(self.windows))]

    def _report(self, done: float) -> None:
        self._watch(done / self._total)


class _Head:
    """The head's sensitivities, a piece of the vocabulary at a time, and the gradient by its input.

    Args:
        x: float32 [T, C], the head's inputs.
        targets: int64 [T], the tokens that follow.
        weight: [V, C] in the checkpoint's dtype.
        watch: Called with the share that is done; may raise to stop.
        cap: `ModelSpec.logit_cap`.
    """

    def __init__(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        watch: Callable[[float], None],
        cap: float | None,
    ) -> None:
        self.x = x
        self.targets = targets
        self.weight = weight
        self.gradient = torch.zeros_like(x)
        self._watch = watch
        self._cap = cap

    def pieces(self) -> Iterator[Array]:
        """float16 [n, C] of consecutive tokens of the vocabulary. `gradient` is whole after the last."""
        logits = _LOGITS // max(1, len(self.targets))
        parts = [slice(n, n + max(1, logits)) for n in range(0, len(self.weight), max(1, logits))]
        total = torch.full((len(self.targets),), -torch.inf)
        for index, part in enumerate(parts):
            self._watch(index / (2 * len(parts)))
            total = torch.logaddexp(total, self._logits(self._rows(part)).logsumexp(1))
        squares = self.x.square()
        for index, part in enumerate(parts):
            self._watch((1 + index / len(parts)) / 2)
            rows = self._rows(part)
            found = self._logits(rows)
            wrong = (found - total[:, None]).exp_()
            inside = torch.nonzero((self.targets >= part.start) & (self.targets < part.start + len(rows)))[:, 0]
            wrong[inside, self.targets[inside] - part.start] -= 1
            if self._cap is not None:  # the slope of the cap
                wrong *= 1 - (found / self._cap).square()
            self.gradient.addmm_(wrong, rows)
            yield _relative(wrong.square_().T @ squares, "head")

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.x @ rows.T
        return logits if self._cap is None else capped(logits, self._cap)

    def _rows(self, part: slice) -> torch.Tensor:
        return self.weight[part].to(torch.float32)


def _relative(sums: torch.Tensor, name: str) -> npt.NDArray[np.float16]:
    """Sums [N, K] as shares of each row's largest, float16; rows of zeros stay so."""
    largest = sums.amax(1, keepdim=True)
    if not torch.isfinite(largest).all():
        raise QuantizationError(
            f"{name}: the full-precision model or its gradient holds NaN or infinity; the checkpoint is damaged"
        )
    shares: npt.NDArray[np.float16] = sums.div_(torch.where(largest > 0, largest, 1)).to(torch.float16).numpy()
    return shares


def _readable(path: Path) -> bool:
    try:
        MappedTensors(path)
    except StoreError:
        return False
    return True
