"""`lowbit-chat bench`: speed and memory of a model on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.amounts import byte_count
from app.cli import options
from app.cli.load import load_model, load_options
from app.cli.model import open_model
from app.cli.output import Interrupt, Output
from app.cli.services import DEMO, Services, services_of
from app.language import _, ngettext
from app.reports import reported
from runtime.compensation import EXACT, Compensation, layer_words

if TYPE_CHECKING:
    from models.progress import Cancelled
    from runtime.backends.decoder import Decoder
    from runtime.measure.speed import SpeedAt

_ROUND = 256
"""The context is rounded up to a multiple of this many tokens."""


def bench(
    ctx: typer.Context,
    model: options.ModelOrUsual = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Tokens to prefill; default: 256.", show_default=False)
    ] = None,
    decode_tokens: Annotated[
        int | None, typer.Option("--decode-tokens", min=1, help="Tokens to decode; default: 128.", show_default=False)
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option(
            "--at",
            metavar="TOKENS",
            min=1,
            help="Also measure decoding with this many tokens in the cache, filled without a prompt; may be repeated.",
            show_default=False,
        ),
    ] = None,
    kv: options.KVOption = None,
    speculation: options.Speculation = None,
    gamma: options.Gamma = None,
    k_chunk: options.KChunk = None,
    budget: options.BudgetOrExact = None,
    prompt_budget: options.PromptBudget = None,
    backend: options.BackendOption = None,
    experts_on_device: options.ExpertsOnDevice = None,
    layers_on_device: options.LayersOnDevice = None,
    as_json: options.Json = False,
) -> None:
    """Measure time to the first token, prefill and decode speed, and compare them with the memory's bandwidth."""
    from app.settings import load
    from runtime.kv.kinds import KINDS, SPECULATIVE_KV
    from runtime.measure.speed import default_lengths, measure, measure_at, peak_memory_bytes
    from runtime.system.power import power_words

    options.check_speculation(speculation, gamma, kv)
    if speculation and kv is not None and not (budget == EXACT or KINDS[kv].has_draft):
        raise typer.BadParameter(
            _("drafts of the model are measured, and need the {wanted} cache, not {kv}", wanted=SPECULATIVE_KV, kv=kv),
            param_hint="--speculate",
        )
    asked = options.compensation(budget, k_chunk, prompt_budget) or Compensation(k_chunk=0)
    output, services = Output(as_json=as_json), services_of(ctx)
    named = model or load().model or DEMO
    stored = open_model(named, services, output)
    usual_prompt, usual_decode = default_lengths(stored.spec.max_context)
    prompt, decode = prompt_tokens or usual_prompt, decode_tokens or usual_decode
    # Backends round the cache up to whole blocks; with a round context, sizes per token are exact.
    longest = max([prompt, *(at or ())]) + decode
    context = -(-longest // _ROUND) * _ROUND
    if longest <= stored.spec.max_context:
        context = min(context, stored.spec.max_context)
    wanted = load_options(
        stored,
        kv=kv,
        context=context,
        compensation=asked,
        prompt_budget=prompt_budget or 0.0,
        speculate=bool(speculation),
        gamma=gamma,
        backend=backend,
        experts_on_device=experts_on_device,
        layers_on_device=layers_on_device,
    )
    loaded = load_model(stored, wanted, services, output, budgets_asked=True)
    with contextlib.closing(loaded.engine) as engine, engine.borrow(context) as decoder:
        with Interrupt() as interrupt, output.progress() as progress:
            speed = measure(
                decoder,
                prompt_tokens=prompt,
                decode_tokens=decode,
                progress=progress,
                cancelled=interrupt.cancelled,
            )
            speeds_at = [
                measure_at(
                    decoder, tokens=tokens, decode_tokens=decode, progress=progress, cancelled=interrupt.cancelled
                )
                for tokens in at or ()
            ]
            compensation = (
                None
                if budget in (None, EXACT) and not k_chunk
                else _compensation(decoder, services, interrupt.cancelled)
            )
            prompts = _prompts(decoder, interrupt.cancelled) if prompt_budget else None
            speculated = None
            if speculation:
                text = services.evaluation_text()
                tokens = engine.tokenizer.encode(text)[:prompt]
                speculated = _speculation(decoder, tokens, decode, gamma, interrupt.cancelled)
        peak = peak_memory_bytes()
    device, limit = _device(decoder, services)
    power = power_words()
    if as_json:
        output.result(
            {
                "ttft_s": speed.ttft_s,
                "prefill_tokens_per_s": speed.prefill_tokens_per_s,
                "decode_tokens_per_s": speed.decode_tokens_per_s,
                "bytes_per_token": speed.bytes_per_token,
                "bandwidth_limit_gb_s": limit,
                "percent_of_limit": speed.percent_of_limit(limit),
                "peak_memory_bytes": peak,
                "kv_bytes_per_token": speed.kv_bytes_per_token,
                "device": device,
                "power": power,
                **({"at": [_at(speed_at) for speed_at in speeds_at]} if at else {}),
                **(compensation or {}),
                **(prompts or {}),
                **({"speculation": speculated} if speculated else {}),
            }
        )
        return
    output.text(_("{model} on {device} ({backend})", model=stored.name, device=device, backend=decoder.backend))
    first = _("{time:.0f} ms after {count} prompt tokens", time=1000 * speed.ttft_s, count=speed.prompt_tokens)
    decoded = _(
        "{speed:.1f} tokens/s (median of {count} steps)", speed=speed.decode_tokens_per_s, count=speed.decode_tokens
    )
    read = _(
        "{size} per token, {share:.0f} % of the {limit:.1f} GB/s that this device reads",
        size=byte_count(speed.bytes_per_token),
        share=speed.percent_of_limit(limit),
        limit=limit,
    )
    held = _("{size}, {cache} of cache per token", size=byte_count(peak), cache=byte_count(speed.kv_bytes_per_token))
    rows = [
        *([] if power is None else [(_("power"), reported(power))]),
        (_("first token"), first),
        (_("prefill"), _("{speed:.0f} tokens/s", speed=speed.prefill_tokens_per_s)),
        (_("decode"), decoded),
        (_("memory read"), read),
        (_("peak memory"), held),
    ]
    for speed_at in speeds_at:
        told = _(
            "{speed:.1f} tokens/s, {size} read per token, {cache} of cache (filled with copies of pages, "
            "without a prompt)",
            speed=speed_at.decode_tokens_per_s,
            size=byte_count(speed_at.bytes_per_token),
            cache=byte_count(speed_at.kv_bytes),
        )
        rows += [(_("at {count:,}", count=speed_at.tokens), told)]
    if compensation is not None:
        chosen = ", ".join(f"{reported(layer_words(kind))} {count}" for kind, count in compensation["k_chunk"].items())
        rows.append(
            (
                _("compensation"),
                _(
                    "{slower:.1f} % slower than without; k_chunk: {chosen}",
                    slower=compensation["slowdown_percent"],
                    chosen=chosen,
                ),
            )
        )
    if prompts is not None:
        slower, tokens = prompts["prompt_slowdown_percent"], prompts["prompt_slowdown_tokens"]
        rows.append(
            (
                _("prompts"),
                _(
                    "{slower:.1f} % slower than without compensation, over {count} tokens; k_chunk {k_chunk}",
                    slower=slower,
                    count=tokens,
                    k_chunk=prompts["prompt_k_chunk"],
                ),
            )
        )
    if speculated is not None:
        edge = speculated["break_even"]
        pays = _("it never pays") if edge is None else _("it pays from {share:.0f} % accepted on", share=100 * edge)
        rows.append(
            (
                _("speculation"),
                _(
                    "{speed:.1f} tokens/s, {plain:.1f} without, of the same text; {share:.0f} % of drafts accepted "
                    "({pays}), {tokens:.1f} tokens per verify, gamma {gamma}",
                    speed=speculated["tokens_per_s"],
                    plain=speculated["plain_tokens_per_s"],
                    share=100 * speculated["acceptance_rate"],
                    pays=pays,
                    tokens=speculated["tokens_per_verify"],
                    gamma=speculated["gamma"],
                ),
            )
        )
    output.fields(rows, 14)


def _device(decoder: Decoder, services: Services) -> tuple[str, float]:
    """The devices that a decoder computes on, and the bandwidth in 10^9 bytes per second at which a token is read."""
    from runtime.backends import backend

    names, seconds = list[str](), 0.0
    parts: Sequence[Decoder] = getattr(decoder, "parts", (decoder,))
    for part in parts:
        used = backend(part.backend)
        gb_s, card = used.memory_gb_s(), used.probe().gpu
        if gb_s is None or card is None:
            cpu = services.machine().cpu
            names.append(f"{cpu.name}, {ngettext('{count} core', '{count} cores', cpu.usable_cores)}")
            gb_s = services.bandwidth(fresh=True).gb_s
        else:
            names.append(card.name)
        seconds += part.weight_bytes / gb_s
    return _(" and ").join(names), decoder.weight_bytes / seconds


def _speculation(
    decoder: Decoder, tokens: list[int], count: int, gamma: int | None, cancelled: Cancelled
) -> dict[str, Any]:
    """Continue a real text with and without speculation: random prompts cannot be drafted."""
    from runtime.engine.measure import measure_speculation

    speed = measure_speculation(decoder, tokens, max(2, count), gamma=gamma, cancelled=cancelled)
    did = speed.speculated.speculation
    return {
        "gamma": did.gamma,
        "acceptance_rate": did.acceptance_rate,
        "tokens_per_verify": did.tokens_per_verify,
        "tokens_per_s": speed.speculated.tokens_per_s,
        "plain_tokens_per_s": speed.plain.tokens_per_s,
        "speedup": speed.speedup,
        "break_even": speed.break_even,
    }


def _at(speed: SpeedAt) -> dict[str, Any]:
    """A speed at a context length, as a JSON object."""
    return {
        "tokens": speed.tokens,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
        "bytes_per_token": speed.bytes_per_token,
        "kv_bytes": speed.kv_bytes,
    }


def _prompts(decoder: Decoder, cancelled: Cancelled) -> dict[str, Any]:
    """The decoder's compensation of prompts, and its slowdown measured now by alternating."""
    from runtime.budget.prompt_tuning import PromptTimer

    level, timer = decoder.options.prompt_k_chunk, PromptTimer(decoder, cancelled=cancelled)
    slowdown = timer.slowdown(level) if level else 0.0
    return {
        "prompt_slowdown_percent": slowdown,
        "prompt_slowdown_tokens": timer.tokens if level else 0,
        "prompt_k_chunk": level,
    }


def _compensation(decoder: Decoder, services: Services, cancelled: Cancelled) -> dict[str, Any]:
    """The decoder's compensation, and its slowdown measured now by alternating."""
    from runtime.compensation import k_chunk_by_type

    k_chunk = k_chunk_by_type(decoder.options.k_chunk)
    slowdown = services.slowdown(decoder, cancelled) if any(k_chunk.values()) else 0.0
    return {"slowdown_percent": slowdown, "k_chunk": k_chunk}
