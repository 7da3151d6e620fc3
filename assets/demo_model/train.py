"""The training of the bundled model: `python -m assets.demo_model.train --output FOLDER`.

Run again with the same folder, it goes on where it stopped and ends with the very same weights. With `--finish-by` the
learning rate follows the clock as well, so that it has come down by then; such a run depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets.demo_model import vocabulary
from assets.demo_model.batches import Batch, batches
from assets.demo_model.corpus import Writer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from assets.demo_model.network import Network

_STATE = "state.pt"
EVALUATION_TOKENS = 16384
"""Tokens of held-out conversations over which the held-out loss is taken."""

_SHAPE = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the trained weights."""

    hidden: int = 256
    """C, a multiple of 64."""
    intermediate: int = 512
    """Width of the MLP."""
    layers: int = 4
    """Blocks."""
    heads: int = 4
    """Query heads of 64 dimensions."""
    kv_heads: int = 2
    """Key-value heads; divides `heads`."""
    vocabulary: int = vocabulary.VOCABULARY
    """V."""
    context: int = 1024
    """Longest context in tokens."""
    tokens: int = 3072
    """About how many tokens a step has."""
    part: int = 1024
    """Most tokens, padding counted, that go through the model at once."""
    steps: int = 2600
    """Optimizer steps."""
    warmup: int = 40
    """Steps of rising learning rate."""
    decay: float = 0.55
    """Share of the training at whose end the learning rate falls to nothing, along a straight line."""
    learning_rate: float = 0.008
    """Muon's peak learning rate, for the matrices of the blocks."""
    vector_rate: float = 0.0012
    """AdamW's peak learning rate, for embedding and norms."""
    weight_decay: float = 0.02
    """Muon's decay."""
    seed: int = 1
    """Seed of weights and data."""
    tokenizer_texts: int = 20000
    """Conversations from which the tokenizer is made."""
    bfloat16: bool = True
    """Whether matrix products run in bfloat16; weights and optimizer are fp32."""

    def __post_init__(self) -> None:
        whole = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary", "context", "tokens", "part")
        for name in (*whole, "steps", "warmup", "tokenizer_texts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {self.decay}")


def model_of(plan: Plan) -> Network:
    """A network with random weights (the caller seeds)."""
    from assets.demo_model.network import Network

    return Network(
        vocabulary=plan.vocabulary,
        hidden=plan.hidden,
        intermediate=plan.intermediate,
        layers=plan.layers,
        heads=plan.heads,
        kv_heads=plan.kv_heads,
    )


def rate_factor(plan: Plan, step: int, done: float = 0.0) -> float:
    """Share of the peak learning rates at a step: a linear rise, a plateau, a straight fall to nothing.

    Args:
        plan: The plan.
        step: Step from 0.
        done: Share of the allotted time that is over, if a time is given.

    Returns:
        A number from 0 to 1.
    """
    share = max(done, (step + 0.5) / plan.steps)
    return min(1.0, (step + 1) / plan.warmup, max(0.0, 1.0 - share) / plan.decay)


class Trainer:
    """Trains one plan in one folder.

    Args:
        plan: The plan.
        folder: Where the state, the log and the checkpoint are kept; an unfinished run in it goes on.
        start: Folder of a finished run whose weights, optimizers and tokenizer a new run begins with, or None for
            random weights.
    """

    def __init__(self, plan: Plan, folder: Path, *, start: Path | None = None) -> None:
        import torch

        from assets.demo_model.muon import Muon

        self.plan, self.folder = plan, folder
        folder.mkdir(parents=True, exist_ok=True)
        if start is not None:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (folder / name).write_bytes((start / name).read_bytes())
        self.tokenizer = self._tokenizer()
        self.train_data, self.held_out = Writer("train", plan.seed), Writer("held_out", plan.seed)
        torch.manual_seed(plan.seed)
        self.model = model_of(plan)
        matrices = self.model.matrices()
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in self.model.parameters() if id(weight) not in chosen]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, lr=plan.learning_rate, weight_decay=plan.weight_decay),
            torch.optim.AdamW(others, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._recent = [0.0, 0]
        if self._state_file.exists():
            self._restore()
        elif start is not None:
            self._begin_from(start / _STATE)

    @property
    def _state_file(self) -> Path:
        return self.folder / _STATE

    def _tokenizer(self) -> Tokenizer:
        if not (self.folder / "tokenizer.json").exists():
            writer = Writer("train", self.plan.seed)
            conversations = (writer.conversation(index) for index in range(self.plan.tokenizer_texts))
            texts = (turn["content"] for conversation in conversations for turn in conversation.messages())
            tokenizer = vocabulary.build(texts, self.plan.vocabulary)
            vocabulary.save(tokenizer, self.folder, context=self.plan.context)
        return vocabulary.load(self.folder)

    def run(self, *, until: int, save_every: int, finish_by: float | None = None) -> None:
        """Train up to a step and save there.

        Args:
            until: Step to stop at, at most the plan's.
            save_every: Steps between two checkpoints.
            finish_by: Moment (seconds as of `time.time`) by which the learning rate shall have come down, or None.
        """
        until = min(until, self.plan.steps)
        started = time.time() - self.seconds
        while self.step < until:
            now = time.time()
            done = 0.0 if finish_by is None else 1.0 if now >= finish_by else (now - started) / (finish_by - started)
            self._one_step(rate_factor(self.plan, self.step, done))
            if done >= 1.0:
                until = self.step
            if self.step % save_every == 0 or self.step == until:
                self.save()

    def _one_step(self, factor: float) -> None:
        import torch

        plan, started = self.plan, time.perf_counter()
        for optimizer, rate in zip(self.optimizers, (plan.learning_rate, plan.vector_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad()
        parts = self._parts(self.train_data, self.step, plan.tokens)
        total = sum(float(part.weights.sum()) for part in parts)
        for part in parts:
            losses, weights = self._losses(part, bfloat16=plan.bfloat16)
            ((losses * weights).sum() / total).backward()
            self._recent[0] += float(losses.detach()[weights == 1].sum())
            self._recent[1] += int((weights == 1).sum())
            self.tokens += int((part.tokens != self._padding).sum())
        torch.nn.utils.clip_grad_norm_(self.optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.seconds += time.perf_counter() - started
        if self.step % 20 == 0:
            self._log(loss=self._recent[0] / self._recent[1], rate=factor)
            self._recent = [0.0, 0]

    @property
    def _padding(self) -> int:
        return vocabulary.token_id(self.tokenizer, vocabulary.PAD)

    def _parts(self, writer: Writer, step: int, tokens: int) -> tuple[Batch, ...]:
        plan = self.plan
        return batches(writer, self.tokenizer, step, tokens=tokens, part=plan.part, context=plan.context)

    def _losses(self, part: Batch, *, bfloat16: bool) -> tuple[Any, Any]:
        import torch

        weights = torch.from_numpy(part.weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            losses = self.model.losses(torch.from_numpy(part.tokens), weights > 0)
        return losses, weights[weights > 0]

    def held_out_loss(self) -> float:
        """Mean loss in nats over the answers' tokens of held-out conversations."""
        import torch

        total, count = 0.0, 0
        with torch.no_grad():
            for part in self._parts(self.held_out, 0, EVALUATION_TOKENS):
                losses, weights = self._losses(part, bfloat16=False)
                total, count = total + float(losses[weights == 1].sum()), count + int((weights == 1).sum())
        return total / count

    def _log(self, **values: float) -> None:
        row = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1), **values}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")

    def save(self) -> None:
        """Write the training state, and the model as a checkpoint folder `checkpoint`, each in one piece."""
        import torch

        self._log(held_out_loss=self.held_out_loss())
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "recent": self._recent,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        new = self.folder / "state.new"
        torch.save(state, new)
        new.replace(self._state_file)
        export(self.model, self.tokenizer, self.plan, self.folder / "checkpoint")

    def _restore(self) -> None:
        import torch

        state = torch.load(self._state_file, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise SystemExit(f"{self._state_file} was made with another plan; use another --output or the same options")
        self._take(state)
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self._recent = state["recent"]

    def _begin_from(self, file: Path) -> None:
        """Take over the weights and optimizers of a run whose plan has the same shape; steps count from 0 again."""
        import torch

        state = torch.load(file, weights_only=True)
        other = [name for name in _SHAPE if state["plan"][name] != getattr(self.plan, name)]
        if other:
            raise SystemExit(f"{file} was made with another {', '.join(other)}; give the options of that run")
        self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, old in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(old)


def export(model: Network, tokenizer: Tokenizer, plan: Plan, folder: Path) -> None:
    """Write a Hugging Face checkpoint folder in bfloat16."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from assets.demo_model.network import EPSILON, ROTARY_BASE

    begin, end, pad = (
        vocabulary.token_id(tokenizer, name) for name in (vocabulary.BEGIN, vocabulary.END, vocabulary.PAD)
    )
    config = LlamaConfig(
        vocab_size=plan.vocabulary,
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=64,
        max_position_embeddings=plan.context,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=True,
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=pad,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    generation = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_file(model.checkpoint(), folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary.save(tokenizer, folder, context=plan.context)


def moment(text: str, now: datetime) -> float:
    """Seconds as of `time.time` of the next `HH:MM` in UTC."""
    hours, minutes = (int(part) for part in text.split(":"))
    at = now.replace(hour=hours, minute=minutes, second=0, microsecond=0)
    return (at if at > now else at + timedelta(days=1)).timestamp()


def main(arguments: list[str] | None = None) -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m assets.demo_model.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the run; an unfinished run goes on")
    parser.add_argument("--start", type=Path, help="folder of a run to begin with instead of random weights")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--until", type=int, default=sys.maxsize, help="stop at this step")
    parser.add_argument("--finish-by", metavar="HH:MM", help="UTC time at which the training shall be over")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    kinds: dict[str, type[Any]] = {"int": int, "float": float}
    for item in fields(Plan):
        option = f"--{item.name.replace('_', '-')}"
        if item.type == "bool":
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=item.default)
        else:
            parser.add_argument(option, type=kinds[str(item.type)], default=item.default)
    given = vars(parser.parse_args(arguments))
    output, start = given.pop("output"), given.pop("start")
    save_every, until = given.pop("save_every"), given.pop("until")
    clock = given.pop("finish_by")
    finish_by = None if clock is None else moment(clock, datetime.now(UTC))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    torch.set_num_threads(given.pop("threads"))
    try:
        plan = Plan(**given)
    except ValueError as error:
        parser.error(str(error))
    Trainer(plan, output, start=start).run(until=until, save_every=save_every, finish_by=finish_by)


if __name__ == "__main__":
    main()
