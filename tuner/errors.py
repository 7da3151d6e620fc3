"""Errors of `tuner`.

TunerError
 ├─ BudgetError          a slowdown budget that means nothing
 ├─ ShapeError           no layers, a layer twice, a size that can't be, or a shape of an unknown name
 ├─ UnknownDeviceError   a device whose specification is not known here
 ├─ TimerError           a product could not be timed: the device vanished, or ran out of memory
 ├─ ProfileError         a profile could not be saved
 └─ Cancelled            the tuning was asked to stop
"""


class TunerError(Exception):
    """Base of all errors of this package. The message says what happened, where, and what to do."""


class BudgetError(TunerError):
    """A slowdown budget that means nothing: it has to be above 0 and at most 100 percent."""


class ShapeError(TunerError):
    """No layers, a layer twice, a size that can't be, or a shape of an unknown name."""


class UnknownDeviceError(TunerError):
    """A device whose specification is not known here."""


class TimerError(TunerError):
    """A product could not be timed: the device vanished, ran out of memory, or reported a time that can't be."""


class ProfileError(TunerError):
    """A profile could not be saved."""


class Cancelled(TunerError):
    """The tuning was asked to stop."""
