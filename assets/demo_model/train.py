"""Train the bundled model: `python -m assets.demo_model.train --output FOLDER`.

Run again with the same folder, it goes on where it stopped and ends with the very same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets.demo_model import vocabulary
from assets.demo_model.batches import Batch, batch
from assets.demo_model.corpus import Writer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer


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
    """Longest context in tokens, and the length of a long row."""
    length: int = 256
    """Length of an ordinary row."""
    rows: int = 16
    """Ordinary rows a step; a step of long rows has the same number of tokens."""
    long_every: int = 8
    """Every so many steps the rows are long."""
    steps: int = 1600
    """Optimizer steps."""
    warmup: int = 100
    """Steps of rising learning rate."""
    learning_rate: float = 2e-3
    """Peak learning rate; a cosine takes it down to a twentieth."""
    weight_decay: float = 0.05
    """AdamW's decay of matrices."""
    seed: int = 1
    """Seed of weights and data."""
    tokenizer_texts: int = 40000
    """Conversations from which the tokenizer is made."""
    bfloat16: bool = True
    """Whether matrix products run in bfloat16; weights and optimizer are fp32."""

    def __post_init__(self) -> None:
        whole = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary", "context", "length", "rows")
        for name in (*whole, "long_every", "steps", "warmup", "tokenizer_texts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.context % self.length or self.rows * self.length % self.context:
            raise ValueError("context must be a multiple of length, and rows * length of context")


def model_of(plan: Plan, tokenizer: Tokenizer) -> torch.nn.Module:
    """A Llama model with random weights (the caller seeds)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=plan.vocabulary,
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=64,
        max_position_embeddings=plan.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=vocabulary.token_id(tokenizer, vocabulary.BEGIN),
        eos_token_id=vocabulary.token_id(tokenizer, vocabulary.END),
        pad_token_id=vocabulary.token_id(tokenizer, vocabulary.PAD),
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model


def token_losses(model: torch.nn.Module, data: Batch, *, bfloat16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of every token but a row's first.

    Args:
        model: The model.
        data: Rows of tokens.
        bfloat16: Whether matrix products run in bfloat16.

    Returns:
        Losses in nats and weights, both fp32 [B, S - 1].
    """
    import torch

    tokens = torch.from_numpy(data.tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses, torch.from_numpy(data.weights)[:, 1:]


def learning_rate(plan: Plan, step: int) -> float:
    """Learning rate of a step: a linear rise, then a cosine."""
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """Trains one plan in one folder."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        import torch

        self.plan, self.folder = plan, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer()
        self.train_data, self.held_out = Writer("train", plan.seed), Writer("held_out", plan.seed)
        torch.manual_seed(plan.seed)
        self.model = model_of(plan, self.tokenizer)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        if self._state_file.exists():
            self._restore()

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.pt"

    def _tokenizer(self) -> Tokenizer:
        if not (self.folder / "tokenizer.json").exists():
            writer = Writer("train", self.plan.seed)
            conversations = (writer.conversation(index) for index in range(self.plan.tokenizer_texts))
            texts = (turn["content"] for conversation in conversations for turn in conversation.messages())
            tokenizer = vocabulary.build(texts, self.plan.vocabulary)
            vocabulary.save(tokenizer, self.folder, context=self.plan.context)
        return vocabulary.load(self.folder)

    def run(self, *, until: int, save_every: int) -> None:
        """Train up to a step and save there.

        Args:
            until: Step to stop at, at most the plan's.
            save_every: Steps between two checkpoints.
        """
        until = min(until, self.plan.steps)
        while self.step < until:
            self._one_step()
            if self.step % save_every == 0 or self.step == until:
                self.save()

    def _one_step(self) -> None:
        import torch

        plan, started = self.plan, time.perf_counter()
        rate = learning_rate(plan, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses, weights = token_losses(self.model, self._batch(self.step), bfloat16=plan.bfloat16)
        loss = (losses * weights).sum() / weights.sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.tokens += int((weights > 0).sum())
        self.seconds += time.perf_counter() - started
        if self.step % 25 == 0:
            answers = weights == 1
            self._log(loss=float(losses.detach()[answers].mean()), learning_rate=rate)

    def _batch(self, step: int) -> Batch:
        plan = self.plan
        long = step % plan.long_every == plan.long_every - 1
        length = plan.context if long else plan.length
        rows = plan.rows * plan.length // length
        return batch(self.train_data, self.tokenizer, step, rows=rows, length=length, long=long)

    def held_out_loss(self, batches: int = 4) -> float:
        """Mean loss in nats over the answers' tokens of held-out conversations."""
        import torch

        plan, total, count = self.plan, 0.0, 0
        with torch.no_grad():
            for step in range(batches):
                rows = batch(self.held_out, self.tokenizer, step, rows=plan.rows, length=plan.length, long=False)
                losses, weights = token_losses(self.model, rows, bfloat16=False)
                answers = weights == 1
                total, count = total + float(losses[answers].sum()), count + int(answers.sum())
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
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
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
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]


def export(model: torch.nn.Module, tokenizer: Tokenizer, plan: Plan, folder: Path) -> None:
    """Write a Hugging Face checkpoint folder in bfloat16.

    Args:
        model: A model of `model_of`.
        tokenizer: Its tokenizer.
        plan: Its plan.
        folder: Where to write; made if absent.
    """
    import copy

    import torch

    small: Any = copy.deepcopy(model).to(torch.bfloat16)
    small.generation_config.do_sample = False
    small.generation_config.max_length = None
    small.save_pretrained(folder)
    vocabulary.save(tokenizer, folder, context=plan.context)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m assets.demo_model.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the run; an unfinished run goes on")
    parser.add_argument("--save-every", type=int, default=250, help="steps between two checkpoints")
    parser.add_argument("--until", type=int, default=sys.maxsize, help="stop at this step")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    kinds: dict[str, type[Any]] = {"int": int, "float": float}
    for item in fields(Plan):
        option = f"--{item.name.replace('_', '-')}"
        if item.type == "bool":
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=item.default)
        else:
            parser.add_argument(option, type=kinds[str(item.type)], default=item.default)
    given = vars(parser.parse_args(arguments))
    output, save_every, until = given.pop("output"), given.pop("save_every"), given.pop("until")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    torch.set_num_threads(given.pop("threads"))
    try:
        plan = Plan(**given)
    except ValueError as error:
        parser.error(str(error))
    Trainer(plan, output).run(until=until, save_every=save_every)


if __name__ == "__main__":
    main()
