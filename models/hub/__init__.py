"""Checkpoints from the Hugging Face hub, in the cache that transformers and huggingface_hub share.

The layout, the locks and the settings (`HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`) are
huggingface_hub's; the transfer is our own, because huggingface_hub throws away a file that did not come to its end.
A file in transit is `blobs/<digest>.incomplete`; the next run asks for the rest of it alone.
"""

from models.hub.cache import cached
from models.hub.listing import is_hub_name
from models.hub.snapshot import cached_file, pull, pull_file
from models.hub.transport import Policy

__all__ = ["Policy", "cached", "cached_file", "is_hub_name", "pull", "pull_file"]
