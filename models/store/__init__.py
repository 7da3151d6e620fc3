"""The store of low-bit models: names, files, checksums. Nothing here imports torch."""

from models.store.model import StoredModel, StoredModelInfo
from models.store.store import DamagedModel, Store, check_name, default_name

__all__ = ["DamagedModel", "Store", "StoredModel", "StoredModelInfo", "check_name", "default_name"]
