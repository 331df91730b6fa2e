"""The errors and warnings of the package; this module imports nothing."""


class HDIError(Exception):
    """Base of every error that this package raises."""


class ShapeError(HDIError, ValueError):
    """A tensor does not have the shape that a quantity is defined on."""


class MisconfigurationError(HDIError, ValueError):
    """An argument cannot work; raised before training starts, and says what to write instead."""


class NothingToWatchError(MisconfigurationError):
    """No attention is read in the first forward of a model, and `strict` is set; ends the run before its first step."""


class UnsupportedAttentionError(HDIError, ValueError):
    """The heads of an attention layer cannot be established; the message says why and what to do."""


class HDIWarning(UserWarning):
    """Base of every warning that this package gives."""


class UnsupportedAttentionWarning(HDIWarning):
    """An attention layer was left out because its heads cannot be established."""


class MonitoringWarning(HDIWarning):
    """Something went wrong while monitoring; the training run goes on."""
