"""Compiles ahead, where a program is installed, what the first answer would wait for: `python -m app.cli.prepare`."""

from __future__ import annotations

import sys

from app.cli.errors import explained, in_one_line
from app.cli.load import LoadChoices, load_plan
from app.cli.output import NAME, Output, show_everything
from app.cli.services import Services


def prepare(services: Services, output: Output) -> None:
    """Compile the kernels of the bundled model, with the cache that the settings choose; quick where they are there.

    Raises:
        SettingsError: a setting is not acceptable.
        RuntimeFailure: nothing can run the model here.
    """
    plan = load_plan(services.demo(), LoadChoices(), services, output)
    with output.progress() as progress:
        plan.prepare(progress, ahead=True)


def main() -> None:
    """Prepare; what goes wrong is told, and left to the first answer to fail over."""
    show_everything()
    try:
        prepare(Services(), Output())
    except explained() as error:
        print(f"{NAME}: the kernels are not compiled ahead: {in_one_line(error)}", file=sys.stderr)


if __name__ == "__main__":
    main()
