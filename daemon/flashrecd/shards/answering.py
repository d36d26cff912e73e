"""Which request is answered by what; knows nothing of sockets.

Files and counters are answered at once. What takes longer (descriptions, replications) is answered later, from another
thread, through the `later` that comes with each request.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from flashrec.errors import FlashrecError, ProtocolError
from flashrec.state.codec import Buffer
from flashrec.state.shardwire import (
    FOR_ADMIN,
    PIECE_BYTES,
    Describe,
    Discard,
    Doubt,
    Fence,
    Forget,
    Get,
    Keep,
    Private,
    Replicate,
    ReplyHeader,
    Request,
    Stats,
    pack_header,
    unpack_request,
)
from flashrecd.shards.counters import Counters
from flashrecd.shards.files import ShardFiles

if TYPE_CHECKING:  # it costs numpy, which the server of a job on one node does without
    from flashrecd.shards.packing import Packer
    from flashrecd.shards.replicas import Replicas

Reply = tuple[ReplyHeader, Buffer]
Later = Callable[[ReplyHeader, Buffer], None]


class Answers:
    """`replicas` is None where no other node takes part; `packer`, where nothing is made smaller."""

    def __init__(
        self, root: Path, counters: Counters, replicas: Replicas | None = None, packer: Packer | None = None
    ) -> None:
        self.files = ShardFiles(root, counters)
        self._counters = counters
        self._replicas = replicas
        self._packer = packer

    def answer(
        self, frames: Sequence[Buffer], later: Later, *, key: bytes = b"", is_local: bool = False
    ) -> list[Buffer] | None:
        """Header and data for one request's frames, or None if they will be given to `later`; never raises for what
        a peer sent. `key`: what the request must carry; `is_local`: it comes from this node."""
        self._counters.requests += 1  # by this thread alone
        try:
            if not 1 <= len(frames) <= 2:
                raise ProtocolError(f"a request of {len(frames)} frames")
            request, its_key = unpack_request(frames[0])
            if not hmac.compare_digest(its_key, key):
                raise ProtocolError("a request with a wrong key")
            if (len(frames) == 2) != isinstance(request, Keep):
                raise ProtocolError(f"a request of {len(frames)} frames")
            if isinstance(request, FOR_ADMIN) and not is_local:
                raise ProtocolError(f"a request to {type(request).__name__.lower()} from elsewhere")
            if self._replicas is None and not isinstance(request, Get | Stats):
                raise ProtocolError(
                    f"a request to {type(request).__name__.lower()} where no replicas are kept"
                )
        except ProtocolError as error:
            self._counters.refuse(str(error))
            return [pack_header(ReplyHeader(-1, "refused", str(error)[:200])), b""]
        try:
            reply = self._answer(request, frames[-1], later)
        except (FlashrecError, OSError) as error:
            reply = ReplyHeader(request.request_id, "failed", str(error)[:1000]), b""
        return None if reply is None else [pack_header(reply[0]), reply[1]]

    def _answer(self, request: Request, data: Buffer, later: Later) -> Reply | None:
        if isinstance(request, Get):
            header, found = self.files.get(request)
            if request.packed and header.status == "ok" and self._packer is not None:
                return None if self._packer.take(header, found, later) else (header, found)
            return header, found
        request_id = request.request_id
        if isinstance(request, Stats):
            return ReplyHeader(request_id, "ok"), _packed(self._counters.as_dict())
        replicas = self._replicas
        assert replicas is not None
        match request:
            case Describe() | Private():
                replicas.tell(request, later)
                return None
            case Replicate():
                replicas.replicate(request, later)
                return None
            case Doubt():
                replicas.doubt(request, later)
                return None
            case Keep():
                return replicas.keep(request, memoryview(data)), b""
            case Fence(generation=generation):
                return ReplyHeader(request_id, "ok"), _packed(replicas.fence(generation))
            case Discard(generation=generation, version=version, sealed=sealed):
                replicas.discard(generation, version, sealed)
            case Forget(ranks=ranks):
                replicas.forget(ranks)
        return ReplyHeader(request_id, "ok"), b""


def piece_of(whole: Buffer, offset: int, request_id: int) -> Reply:
    """The piece at `offset` of what travels in pieces."""
    view = memoryview(whole)
    if offset % PIECE_BYTES or offset >= max(1, view.nbytes):
        return ReplyHeader(request_id, "gone", f"of {view.nbytes} bytes there is no piece at {offset}"), b""
    return ReplyHeader(request_id, "ok", "", view.nbytes), view[offset : offset + PIECE_BYTES]


def _packed(value: object) -> bytes:
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed
