"""The messages between a puller and a shard server: one request frame, one reply of a header and the bytes.

    request  [PROTOCOL, key, op, request id, ...]     op "get": name, offset, size; "stats": nothing
    reply    [request id, status, detail] + data      status "ok", "refused" (malformed, or not allowed),
                                                      "gone" (no such file, or not so long)

Free of torch and numpy, like the server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from flashrec.errors import ProtocolError
from flashrec.state.codec import Buffer
from flashrec.state.manifest import MAX_CHUNK_BYTES

PROTOCOL = "flashrec.shards/1"
MAX_REQUEST_BYTES = 1024
MAX_HEADER_BYTES = 4096
MAX_KEY_BYTES = 64

# Only what is complete, and only what others may want: neither a dot-file nor a step up can be spelt.
_NAME = re.compile(
    r"export/g\d{1,18}\.r\d{1,9}\.\d{1,9}|arena/r\d{1,9}\.\d{1,18}|private/r\d{1,9}\.v\d{1,18}\.g\d{1,18}",
    re.ASCII,
)
_MAX_OFFSET = 1 << 62

Status = Literal["ok", "refused", "gone"]


@dataclass(frozen=True)
class Get:
    """Bytes [offset, offset + size_bytes) of a file."""

    request_id: int
    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Stats:
    """The server's counters, as msgpack in the data."""

    request_id: int


@dataclass(frozen=True)
class ReplyHeader:
    request_id: int
    status: Status
    detail: str


def pack_request(request: Get | Stats, key: bytes) -> bytes:
    if isinstance(request, Get):
        body: list[Any] = ["get", request.request_id, request.name, request.offset, request.size_bytes]
    else:
        body = ["stats", request.request_id]
    packed = msgpack.packb([PROTOCOL, key, *body])
    assert isinstance(packed, bytes)
    return packed


def unpack_request(frame: Buffer) -> tuple[Get | Stats, bytes]:
    """(request, key). Raises ProtocolError for anything `pack_request` does not make."""
    fields = _unpack(frame, MAX_REQUEST_BYTES)
    if len(fields) < 4 or fields[0] != PROTOCOL:
        raise ProtocolError(f"not a request of {PROTOCOL}")
    _, key, op, request_id, *arguments = fields
    if type(key) is not bytes or len(key) > MAX_KEY_BYTES or type(request_id) is not int:
        raise ProtocolError("a request without a proper key or id")
    if op == "stats" and not arguments:
        return Stats(request_id), key
    if op == "get" and len(arguments) == 3:
        name, offset, size_bytes = arguments
        if type(name) is not str or not _NAME.fullmatch(name):
            raise ProtocolError(f"a request for a file that is not served: {name!r:.80}")
        if type(offset) is not int or type(size_bytes) is not int:
            raise ProtocolError("a request for a range that is not two integers")
        if not (0 <= offset <= _MAX_OFFSET and 0 < size_bytes <= MAX_CHUNK_BYTES):
            raise ProtocolError(f"a request for {size_bytes} bytes at {offset}")
        return Get(request_id, name, offset, size_bytes), key
    raise ProtocolError(f"a request to {op!r:.40} with {len(arguments)} arguments")


def pack_header(header: ReplyHeader) -> bytes:
    packed = msgpack.packb([header.request_id, header.status, header.detail])
    assert isinstance(packed, bytes)
    return packed


def unpack_header(frame: Buffer) -> ReplyHeader:
    """Raises ProtocolError for anything `pack_header` does not make."""
    fields = _unpack(frame, MAX_HEADER_BYTES)
    if len(fields) != 3:
        raise ProtocolError("a reply whose header has not three fields")
    request_id, status, detail = fields
    if type(request_id) is not int or type(detail) is not str or status not in ("ok", "refused", "gone"):
        raise ProtocolError("a reply whose header has no id, status or detail")
    return ReplyHeader(request_id, status, detail)


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
