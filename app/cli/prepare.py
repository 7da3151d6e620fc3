"""Ahead-of-time compilation at installation, so that the first answer need not wait: `python -m app.cli.prepare`."""

from __future__ import annotations

import sys

from app.cli.load import load_options, load_plan
from app.cli.output import NAME, Output, explained, in_one_line, sanitize_streams
from app.cli.services import Services
from app.language import _


def prepare(services: Services, output: Output) -> None:
    """Compile the kernels of the bundled model for the cache kind in the settings; quick if already compiled.

    Raises:
        SettingsError: a setting is invalid.
        RuntimeFailure: nothing can run the model here.
    """
    demo = services.demo()
    plan = load_plan(demo, load_options(demo), services)
    with output.progress() as progress:
        plan.prepare(progress, ahead=True)


def main() -> None:
    """Prepare; errors are only reported, since the first answer will raise them."""
    sanitize_streams()
    try:
        prepare(Services(), Output())
    except explained() as error:
        print(f"{NAME}: {_('the kernels are not compiled ahead: {error}', error=in_one_line(error))}", file=sys.stderr)


if __name__ == "__main__":
    main()
