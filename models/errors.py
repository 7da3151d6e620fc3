"""Errors of `models`.

ModelError
 ├─ UnsupportedModelError     the architecture, or an option of it, is not one this program runs
 ├─ CheckpointError           a checkpoint is incomplete, damaged or in a foreign format
 ├─ QuantizationError         the recipe cannot be applied to this model
 ├─ StoreError                a stored model is missing, damaged, or its name is not acceptable
 │   └─ ModelNotFoundError    no stored model of that name
 ├─ HubError                  the hub refuses, or what it sent is not what it promised
 │   └─ HubUnreachableError   the hub does not answer: no network, or it is down
 ├─ PackageIndexError         a package index cannot be asked, or what it sent is not what it should be
 └─ CancelledError            the work was asked to stop
"""


class ModelError(Exception):
    """Base of all errors of this package. The message says what happened, where, and what to do."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option of it, is not one this program runs."""


class CheckpointError(ModelError):
    """A checkpoint is incomplete, damaged or in a foreign format."""


class QuantizationError(ModelError):
    """The recipe cannot be applied to this model."""


class StoreError(ModelError):
    """A stored model is missing or damaged, its name is not acceptable, or the disk refused."""


class ModelNotFoundError(StoreError):
    """No stored model of that name."""


class HubError(ModelError):
    """The hub refuses, what is asked for is not there, or what it sent is not what it promised."""


class HubUnreachableError(HubError):
    """The hub does not answer: there is no network, a proxy is in the way, or the hub is down."""


class PackageIndexError(ModelError):
    """A package index cannot be asked, does not have what is asked for, or sent something else."""


class CancelledError(ModelError):
    """The work was asked to stop; what is done so far is kept, and the same call continues it."""
