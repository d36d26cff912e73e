"""The messages between a shard server and who asks it: rank, replacement, another node's server, the node's daemon.

    request  [PROTOCOL, key, op, request id, argument ...]     "keep" has a second frame, the bytes
    reply    [request id, status, detail, total size] + data

    op           who may       answered with
    get          anyone        the bytes of a file; made smaller, where that was asked for and pays
    stats        anyone        the server's counters, msgpack
    describe     anyone        a sealed version without the tensors' bytes (flashrec.state.describing)
    private      anyone        a version of a rank's private state
    keep         anyone        nothing, once the private state is kept here
    replicate    anyone        nothing, once the version has been pulled, verified and sealed here
    doubt        anyone        nothing, once the replica has been checked; it is let go if it is damaged
    fence        ipc alone     what is kept here: [[rank, private versions, sealed versions] ...], msgpack
    discard      ipc alone     nothing
    forget       ipc alone     nothing

`anyone`: who has the key, or comes by the ipc socket in the job's own directory. What `describe`, `private` and `keep`
move may be larger than a message: it travels in pieces of up to PIECE_BYTES, each with its offset; `total size` is
that of the whole.

    status       ok, packed (ok; the data are made smaller, as flashrec.state.packing does),
                 refused (malformed, not allowed, of a generation that is over: asking again is no use),
                 gone (it is not here), failed (could not be done now: no source answers, no room)

Free of torch and numpy, like the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgpack

from flashrec.errors import ProtocolError
from flashrec.state.codec import Buffer
from flashrec.state.manifest import MAX_CHUNK_BYTES

PROTOCOL = "flashrec.shards/3"
MAX_REQUEST_BYTES = 4096
MAX_HEADER_BYTES = 4096
MAX_KEY_BYTES = 64
PIECE_BYTES = 1 << 20
MAX_PRIVATE_BYTES = 256 << 20
MAX_FORGOTTEN = 256

# Only what is complete, and only what others may want: neither a dot-file nor a step up can be spelt.
_NAME = re.compile(
    r"export/g\d{1,18}\.r\d{1,9}\.\d{1,9}|(?:arena|replica)/r\d{1,9}\.\d{1,18}"
    r"|private/r\d{1,9}\.v\d{1,18}\.g\d{1,18}",
    re.ASCII,
)
_ADDRESS = re.compile(r"(?:tcp|ipc)://[!-~]{1,250}", re.ASCII)
_MAX_NUMBER = 1 << 62

Status = Literal["ok", "packed", "refused", "gone", "failed"]
Where = Literal["arena", "replica"]
"""What a node's own ranks sealed, or what it keeps for the ranks of others."""


@dataclass(frozen=True)
class Get:
    """Bytes [offset, offset + size_bytes) of a file. `packed`: made smaller, where it pays."""

    request_id: int
    name: str
    offset: int
    size_bytes: int
    packed: bool = False


@dataclass(frozen=True)
class Stats:
    """The server's counters, as msgpack in the data."""

    request_id: int


@dataclass(frozen=True)
class Describe:
    """The description of a sealed version, from `offset` on."""

    request_id: int
    where: Where
    rank: int
    version: int
    offset: int = 0


@dataclass(frozen=True)
class Private:
    """The private state of a rank at `version`, from `offset` on."""

    request_id: int
    where: Where
    rank: int
    version: int
    offset: int = 0


@dataclass(frozen=True)
class Keep:
    """Keep private state of `size_bytes` with this xxh3_64; the data are its bytes from `offset` on. `full`: it
    belongs to a full version, of which others are kept than of the rest."""

    request_id: int
    rank: int
    version: int
    generation: int
    full: bool
    size_bytes: int
    checksum: int
    offset: int = 0


@dataclass(frozen=True)
class Replicate:
    """Get version `version` of `rank`, from `where` at the server at `address`. `generation`: the asker's."""

    request_id: int
    rank: int
    version: int
    generation: int
    address: str
    where: Where = "arena"


@dataclass(frozen=True)
class Doubt:
    """What came of the replica of `rank` at `version` did not match its checksum: is it so here?"""

    request_id: int
    rank: int
    version: int


@dataclass(frozen=True)
class Fence:
    """Keep nothing any more for this generation and older ones."""

    request_id: int
    generation: int


@dataclass(frozen=True)
class Discard:
    """`generation` resumes at `version`: private state that older ones kept above it was lost, and so is what was
    sealed above `sealed`. -1: all of it."""

    request_id: int
    generation: int
    version: int
    sealed: int


@dataclass(frozen=True)
class Forget:
    """These ranks' replicas are not kept here any more."""

    request_id: int
    ranks: tuple[int, ...]


Request = Get | Stats | Describe | Private | Keep | Replicate | Doubt | Fence | Discard | Forget
FOR_ADMIN = (Fence, Discard, Forget)


@dataclass(frozen=True)
class ReplyHeader:
    request_id: int
    status: Status
    detail: str = ""
    total_bytes: int = 0


def pack_request(request: Request, key: bytes) -> bytes:
    packed = msgpack.packb([PROTOCOL, key, type(request).__name__.lower(), *vars(request).values()])
    assert isinstance(packed, bytes)
    return packed


def unpack_request(frame: Buffer) -> tuple[Request, bytes]:
    """(request, key). Raises ProtocolError for anything `pack_request` does not make."""
    fields = _unpack(frame, MAX_REQUEST_BYTES)
    if len(fields) < 4 or fields[0] != PROTOCOL:
        raise ProtocolError(f"not a request of {PROTOCOL}")
    _, key, op, request_id, *arguments = fields
    if type(key) is not bytes or len(key) > MAX_KEY_BYTES or type(request_id) is not int:
        raise ProtocolError("a request without a proper key or id")
    kind = _KINDS.get(op) if type(op) is str else None
    if kind is None or len(arguments) != len(_ARGUMENTS[kind]):
        raise ProtocolError(f"a request to {op!r:.40} with {len(arguments)} arguments")
    values = [take(value) for take, value in zip(_ARGUMENTS[kind], arguments, strict=True)]
    return kind(request_id, *values), key


def pack_header(header: ReplyHeader) -> bytes:
    packed = msgpack.packb([header.request_id, header.status, header.detail, header.total_bytes])
    assert isinstance(packed, bytes)
    return packed


def unpack_header(frame: Buffer) -> ReplyHeader:
    """Raises ProtocolError for anything `pack_header` does not make."""
    fields = _unpack(frame, MAX_HEADER_BYTES)
    if len(fields) != 4:
        raise ProtocolError("a reply whose header has not four fields")
    request_id, status, detail, total_bytes = fields
    if type(request_id) is not int or type(detail) is not str or status not in get_args(Status):
        raise ProtocolError("a reply whose header has no id, status or detail")
    if type(total_bytes) is not int or not 0 <= total_bytes <= _MAX_NUMBER:
        raise ProtocolError("a reply whose header has no size")
    return ReplyHeader(request_id, status, detail, total_bytes)


def _unpack(frame: Buffer, max_bytes: int) -> list[Any]:
    size_bytes = memoryview(frame).nbytes
    if size_bytes > max_bytes:
        raise ProtocolError(f"a frame of {size_bytes} bytes, where at most {max_bytes} are allowed")
    try:
        fields = msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a message: {error or type(error).__name__}") from error
    if type(fields) is not list:
        raise ProtocolError("a message that is not a list")
    return fields


def _name(value: object) -> str:
    if type(value) is not str or not _NAME.fullmatch(value):
        raise ProtocolError(f"a request for a file that is not served: {value!r:.80}")
    return value


def _number(most: int = _MAX_NUMBER, least: int = 0) -> Callable[[object], int]:
    def take(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ProtocolError(f"a request with {value!r:.40} for a number from {least} to {most}")
        return value

    return take


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"a request with {value!r:.40} for yes or no")
    return value


def _where(value: object) -> str:
    if type(value) is not str or value not in get_args(Where):
        raise ProtocolError(f"a request to look in {value!r:.40}")
    return value


def _address(value: object) -> str:
    if type(value) is not str or not _ADDRESS.fullmatch(value):
        raise ProtocolError(f"a request to pull from {value!r:.80}")
    return value


def _ranks(value: object) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_FORGOTTEN:
        raise ProtocolError("a request to forget what is no list of ranks")
    return tuple(_RANK(rank) for rank in value)


_RANK = _number(10**9 - 1)
_COUNT = _number(10**18 - 1)
_CHECKSUM = _number((1 << 64) - 1)
_KINDS: dict[str, Callable[..., Request]] = {
    kind.__name__.lower(): kind
    for kind in (Get, Stats, Describe, Private, Keep, Replicate, Doubt, Fence, Discard, Forget)
}
_ARGUMENTS: dict[Callable[..., Request], tuple[Callable[[object], Any], ...]] = {
    Get: (_name, _number(), _number(MAX_CHUNK_BYTES, 1), _flag),
    Stats: (),
    Describe: (_where, _RANK, _COUNT, _number()),
    Private: (_where, _RANK, _COUNT, _number()),
    Keep: (_RANK, _COUNT, _COUNT, _flag, _number(MAX_PRIVATE_BYTES), _CHECKSUM, _number(MAX_PRIVATE_BYTES)),
    Replicate: (_RANK, _COUNT, _COUNT, _address, _where),
    Doubt: (_RANK, _COUNT),
    Fence: (_COUNT,),
    Discard: (_COUNT, _number(10**18 - 1, -1), _number(10**18 - 1, -1)),
    Forget: (_ranks,),
}
