"""Every error gpurt raises on purpose: one sentence a class, one line a message.

A message says what, with numbers - where, as a path - what to do. The command line prints it alone
and exits with code 2; a library user catches `GpurtError`.
"""


class GpurtError(Exception):
    """Base of all errors raised by gpurt."""


class GraphError(GpurtError):
    """A Graph declares something that cannot be planned."""


class PlanError(GpurtError):
    """A Plan is not provably right, or a plan file cannot be read."""


class BoundError(GpurtError):
    """A request asks for more than its plan's bounds."""


class RequestError(GpurtError):
    """A request's own values are bad: an empty prompt, a negative temperature."""


class RingFullError(GpurtError):
    """More requests are unfinished than the submission ring holds."""


class FaultError(GpurtError):
    """A worker gave up: names the task, the edge, seen and needed, and who did not signal."""


class ModelError(GpurtError):
    """A checkpoint is missing, truncated, of an unknown architecture, or contradicts its config."""


class DeviceError(GpurtError):
    """The device that was asked for is absent or cannot run this plan."""


class RankError(GpurtError):
    """Processes that are ranks cannot meet, or one of them is gone."""


class ConfigError(GpurtError):
    """An option or a GPURT_* variable has a value that gpurt does not know."""


class TraceError(GpurtError):
    """A trace file cannot be read or was written by a newer gpurt."""


class ChatError(GpurtError):
    """A chat's input is no text, a command's argument is bad, or a saved chat cannot be used."""


class ClosedError(GpurtError):
    """The Runtime was closed."""


class GpurtWarning(UserWarning):
    """Base of all warnings of gpurt; the command line prints one as one line."""


class CacheWarning(GpurtWarning):
    """A cache folder cannot be written; the work goes on without it."""


class TraceWarning(GpurtWarning):
    """A trace file ends early; what it has is read."""
