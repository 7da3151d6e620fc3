"""Errors of `tuner`.

TunerError
 ├─ BudgetError          a slowdown budget out of range
 ├─ ShapeError           no layers, a layer twice, an impossible size, or an unknown shape
 ├─ UnknownDeviceError   a device without a known specification
 ├─ TimerError           a product could not be timed: the device disappeared or ran out of memory
 ├─ ProfileError         a profile could not be saved
 └─ Cancelled            the tuning was asked to stop
"""


class TunerError(Exception):
    """Base of all errors of this package. The message says what happened, where, and what to do."""


class BudgetError(TunerError):
    """A slowdown budget that is not above 0 and at most 100 percent."""


class ShapeError(TunerError):
    """No layers, a layer twice, an impossible size, or an unknown shape."""


class UnknownDeviceError(TunerError):
    """A device without a known specification."""


class TimerError(TunerError):
    """A product could not be timed: the device disappeared, ran out of memory, or reported an impossible time."""


class ProfileError(TunerError):
    """A profile could not be saved."""


class Cancelled(TunerError):
    """The tuning was asked to stop."""
