"""Everything flashrec raises on purpose; the class says whose fault it is.

FlashrecError
|-- UsageError (also a ValueError)   the caller's: a wrong argument, a call out of order
|   |-- LayoutMismatch               ranks, or a rank and a sealed state, disagree about the layout
|   `-- VersionMismatch              library and daemon are of different releases
|-- EnvironmentFault                 the machine's: no memory, no permission, a port in use
|   `-- DaemonUnavailable            no daemon answers where one was expected
|-- ProtocolError                    a peer's: a message that is malformed, too large or unknown
|-- IntegrityError                   bytes that do not match their checksum
`-- RecoveryFailed                   a failure that cannot be recovered from; says why

StepAbandoned (a BaseException)      not an error: unwinds the body of a step that will be redone
GroupsAborted (a BaseException)      not an error: ends a wait in a forming that was given up
"""


class FlashrecError(Exception):
    """Base of every error flashrec raises."""


class UsageError(FlashrecError, ValueError):
    """The caller did something that cannot work; the message says what to do instead."""


class LayoutMismatch(UsageError):
    """Two ranks (or a rank and a sealed state) describe different tensors."""


class VersionMismatch(UsageError):
    """The library and the daemon come from different releases."""


class EnvironmentFault(FlashrecError):
    """The machine lacks something: memory, permission, a free port, a private name of torch."""


class DaemonUnavailable(EnvironmentFault):
    """No `flashrecd` answers at the address where one was expected."""


class ProtocolError(FlashrecError):
    """A peer sent something that is not a message of this protocol."""


class IntegrityError(FlashrecError):
    """Bytes differ from their checksum, or a record is truncated."""


class RecoveryFailed(FlashrecError):
    """No way back to a consistent version; the message names what has no source."""


class StepAbandoned(BaseException):
    """Unwinds a step's body after a failure elsewhere. Derived from BaseException so that a
    training script's own `except Exception` does not swallow it."""


class GroupsAborted(BaseException):
    """A forming of groups was ended by `abort()`: another failure struck meanwhile."""
