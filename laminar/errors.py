"""The exceptions of Laminar. Messages name the object, the number, the limit and the remedy."""

from __future__ import annotations


class LaminarError(Exception):
    """Base of all errors that Laminar raises on purpose; the command exits with `exit_code`."""

    exit_code = 1


class ConfigError(LaminarError):
    """What the user asked for cannot be done as written; nothing was started or written."""

    exit_code = 2


class StoreError(LaminarError):
    """The store cannot be read or written as the protocol needs."""


class ConfigChanged(LaminarError):
    """A resume has changed the run's config since this worker read it."""


class CorruptSegment(StoreError):
    """A segment fails its checks at a place other than its torn last batch."""


class FormatTooNew(ConfigError):
    """The store was written by a newer format than this version of Laminar reads."""


class CoordinationError(LaminarError):
    """etcd refused a request, or a request cannot be sent as it is."""


class CoordinationUnavailable(CoordinationError):
    """etcd did not answer in time. The request may still have committed: read back before a retry."""


class CoordinationFull(CoordinationUnavailable):
    """etcd's space quota is exhausted: nothing was written, nothing can be until it is freed."""


class LeaseLost(CoordinationError):
    """This worker's lease has ended (or may have): nothing it owned is its own any more."""


class Fenced(CoordinationError):
    """A guarded transaction found that this worker or leader has been replaced."""


class WeightsError(LaminarError):
    """Weights are missing, incomplete, or do not match their layout or digest."""


class EngineError(LaminarError):
    """The inference engine cannot start, load weights or generate."""


class EnvironmentFailure(LaminarError):
    """An environment or reward raised, timed out, or gave no result. Its `status` goes into the experience."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
