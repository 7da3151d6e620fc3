"""An answer of the bundled model, as for a user: planned, loaded, prompted."""

from __future__ import annotations

import time

import torch

from assets import demo_path
from models.store import StoredModel
from runtime.compensation import Compensation
from runtime.load.plan import LoadOptions, plan_load
from runtime.text.sampling import SamplingOptions
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes

QUESTION = "What can you do?"


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row: the answer of the card's backend and the reference's, which must begin alike, and the times."""
    model = StoredModel.open_folder(demo_path(), "demo")
    answers = {}
    for asked in ("triton", "reference") if device.type == "cuda" else ("reference",):
        options = LoadOptions(compensation=Compensation(k_chunk=16), context=512, backend=asked, select="static")
        plan = plan_load(model, options)
        began = time.monotonic()
        engine = plan.open_engine()
        loaded = time.monotonic() - began
        prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}])
        pieces = list(engine.generate(prompt, SamplingOptions(temperature=0, max_tokens=sizes.chat_tokens)))
        engine.close()
        usage, text = pieces[-1].usage, "".join(piece.text for piece in pieces)
        assert usage is not None
        answers[asked] = text
        part.add(
            {"backend": asked, "answer": text, "load_s": round(loaded, 2), "ttft_ms": round(1e3 * usage.ttft_s, 1)}
            | {"tokens_per_s": round(usage.decode_tokens_per_s, 1), "correct": bool(text.strip())}
        )
    if len(answers) > 1:
        first = [text.split()[:8] for text in answers.values()]
        part.add({"what": "both answers begin alike", "correct": first[0] == first[1]})
