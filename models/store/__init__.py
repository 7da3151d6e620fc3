"""The store of low-bit models: names, files, checksums. Nothing here imports torch."""

from models.store.model import StoredModel, StoredModelInfo
from models.store.names import check_name, default_name
from models.store.store import DamagedModel, Store

__all__ = ["DamagedModel", "Store", "StoredModel", "StoredModelInfo", "check_name", "default_name"]
