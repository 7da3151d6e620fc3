"""Measures the certificate of the bundled model, as `quantize` does of others: `python -m tests.lab.certify`."""

import sys

from assets import demo_path, evaluation_text
from models.store import StoredModel
from runtime.load.certificate import certify

if __name__ == "__main__":
    made = certify(StoredModel.open_folder(demo_path(), "demo"), evaluation_text(), backend="cpu")
    print(made.words if made else "it could not be measured", file=sys.stdout if made else sys.stderr)
    sys.exit(made is None)
