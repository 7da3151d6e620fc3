"""A runtime process with a fake model: `python fake_runtime.py --home DIR [--parent-pid N] ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import make_service

from runtime.server.process import prepare, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--model")
    parser.add_argument("--fail", action="store_true")
    arguments = parser.parse_args()
    if arguments.fail:
        sys.stderr.write("warming up\nImportError: no such kernel\n")
        sys.exit(3)
    prepare(arguments.home)
    service, _house = make_service()
    sys.exit(run(service, home=arguments.home, parent_pid=arguments.parent_pid, model=arguments.model))
