"""`lowbit-chat quantize`: makes a low-bit model from a checkpoint."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from app.amounts import byte_count
from app.cli import options
from app.cli.errors import CliError
from app.cli.model import find_checkpoint, quantized
from app.cli.output import Output
from app.cli.services import DEMO, services_of
from models.needed import MAKING, check_needed
from models.recipe import DEFAULT_GROUP_SIZE, DEFAULT_METHOD, EXPECTED_K_CHUNK, GOOD_FOR, QOQ_GROUP_SIZE, Method

METHODS_HELP = ", ".join(f"{method} ({words})" for method, words in GOOD_FOR.items())
"""The quantization methods and their uses."""


class Step(StrEnum):
    """`models.recipe.QOQ_STEPS` as command-line values."""

    ROTATE = "rotate"
    REORDER = "reorder"
    SMOOTH_ATTENTION = "smooth-attention"
    SMOOTH_OUTPUTS = "smooth-outputs"
    CLIP = "clip"


def quantize(
    ctx: typer.Context,
    model: options.Model,
    bits: Annotated[
        float,
        typer.Option(
            "--bits",
            metavar="3|3.5|4",
            help="Bits per weight: 3, 4, or an average in between; the blocks that need it most get 4.",
        ),
    ] = 4,
    method: Annotated[Method, typer.Option("--method", help=f"Base quantizer: {METHODS_HELP}.")] = DEFAULT_METHOD,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help=f"Input channels per scale, a multiple of 32; default: {DEFAULT_GROUP_SIZE}, and {QOQ_GROUP_SIZE} for "
            "qoq, where 0 means one scale per output channel.",
            show_default=False,
        ),
    ] = None,
    residual_bits: Annotated[
        int | None,
        typer.Option(
            "--residual-bits",
            help="Bits of the residuals in RAM: 0, 2, 4, 8 or 16; default: 4, and 0 for qoq.",
            show_default=False,
        ),
    ] = None,
    expect_k_chunk: Annotated[
        int,
        typer.Option(
            "--expect-k-chunk",
            help="The most salient channels per 1024 that compensation is expected to restore: gptq, awq and awq-gptq "
            "are made to be good with none, a quarter and all of them restored, and all residuals are scaled for "
            "these. 0 for use without compensation.",
        ),
    ] = EXPECTED_K_CHUNK,
    smooth_attention: Annotated[
        bool | None,
        typer.Option(
            "--smooth-attention/--no-smooth-attention",
            help="Equalize the channels of keys, for caches of 4 bits or fewer (--kv int4). On by default for qoq.",
            show_default=False,
        ),
    ] = None,
    without: Annotated[
        list[Step] | None,
        typer.Option("--without", help="A step of qoq to leave out; may be given several times.", show_default=False),
    ] = None,
    also: Annotated[
        list[Step] | None,
        typer.Option(
            "--with",
            help="An optional step of qoq: rotate.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Text to calibrate on; default: a bundled one."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the new model.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model of that name.")] = False,
    as_json: options.Json = False,
) -> None:
    """Make a low-bit model; an interrupted run resumes after its last finished block."""
    from models.errors import QuantizationError
    from models.recipe import Recipe

    try:
        for option, steps in (("--without", without), ("--with", also)):
            if steps and method != "qoq":
                raise QuantizationError(f"{option} is for the method qoq, not for {method}")
        if both := sorted(set(without or ()) & set(also or ())):
            raise QuantizationError(f"{both[0]} is both asked for (--with) and left out (--without); drop one")
        asked = {"group_size": group_size, "residual_bits": residual_bits, "smooth_attention": smooth_attention}
        asked |= {step.replace("-", "_"): False for step in without or ()}
        asked |= {step.replace("-", "_"): True for step in also or ()}
        given = {key: value for key, value in asked.items() if value is not None}
        recipe = Recipe.usual(method, bits=bits, expected_k_chunk=expect_k_chunk, **given)
    except QuantizationError as error:
        raise typer.BadParameter(str(error)) from error
    if name == DEMO:
        raise typer.BadParameter(f"{DEMO} is the name of the bundled model: choose another", param_hint="--name")
    check_needed(MAKING)  # before anything is downloaded
    output, services = Output(as_json=as_json), services_of(ctx)
    text = None if calibration is None else read_text(calibration)
    begin = time.perf_counter()
    checkpoint = find_checkpoint(model, services, output)
    info = quantized(checkpoint, recipe, services, output, name=name, calibration=text, force=force)
    summary = info.summary
    if summary.warning:
        output.note(summary.warning)
    if as_json:
        output.result(
            {
                "name": info.name,
                "bits_per_weight": summary.bits_per_weight,
                "gpu_bytes": summary.gpu_bytes,
                "cpu_residual_bytes": summary.residual_bytes,
                "perplexity_before": summary.perplexity_before,
                "perplexity_after": summary.perplexity_after,
                "seconds": time.perf_counter() - begin,
            }
        )
        return
    output.text(
        f"{info.name}: {summary.bits_per_weight:.2f} bits per weight, {byte_count(summary.gpu_bytes)}, "
        f"residuals {byte_count(summary.residual_bytes)}"
    )
    if summary.perplexity_before is not None and summary.perplexity_after is not None:
        before, after = summary.perplexity_before, summary.perplexity_after
        output.text(f"perplexity as a chat gets it: {before:.2f} before, {after:.2f} after")


def read_text(file: Path) -> str:
    """Read a UTF-8 text file, preserving line ends.

    Raises:
        CliError: it cannot be read, or is not UTF-8 text.
    """
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not text in UTF-8 (byte {error.start} is not)") from error
