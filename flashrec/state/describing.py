"""A sealed version without the tensors' bytes, as it travels between nodes; and how what travels in pieces is sealed
against damage. No torch.

    description    [FORMAT, rank, version, generation, path, chunk size, where the data begin, layout, table, blob]
    envelope       content | its xxh3_64

What the receiver needs beyond this it works out from the layout, as the arena's reader does: a sender can give a wrong
layout, but none that contradicts its own pieces, sizes or checksums.
"""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path

import msgpack

from flashrec.errors import IntegrityError, ProtocolError
from flashrec.state.arena import SealedState, SealedVersion
from flashrec.state.arena_format import Cut
from flashrec.state.codec import Buffer, checksum
from flashrec.state.layout import RankLayout
from flashrec.state.manifest import MAX_CHUNK_BYTES, ExportManifest

_FORMAT = 1
_TRAILER = struct.Struct("<Q")
_MAX_NUMBER = 1 << 62


def enclose(content: Buffer) -> bytes:
    return bytes(content) + _TRAILER.pack(checksum(content))


def open_envelope(data: Buffer) -> memoryview:
    """The content. Raises IntegrityError when it is not whole."""
    view = memoryview(data)
    if view.nbytes < _TRAILER.size:
        raise IntegrityError("is truncated")
    content = view[: -_TRAILER.size]
    if _TRAILER.unpack(view[-_TRAILER.size :])[0] != checksum(content):
        raise IntegrityError("does not match its checksum")
    return content


def describe(state: SealedState) -> bytes:
    manifests = state.manifests
    table = list(chain.from_iterable(manifest.checksums for manifest in manifests))
    chunk_bytes = manifests[0].chunk_bytes if manifests else 1
    content: bytes = msgpack.packb(
        [
            _FORMAT,
            state.layout.rank,
            state.sealed.version,
            state.sealed.generation,
            str(state.path.absolute()),
            chunk_bytes,
            manifests[0].offset if manifests else 0,
            state.layout.to_bytes(),
            struct.pack(f"<{len(table)}Q", *table),
            state.blob,
        ]
    )
    return enclose(content)


def described(data: Buffer, rank: int, version: int) -> SealedState:
    """What `describe` was given, if it is of this rank and version. Raises IntegrityError: take another source."""
    try:
        fields = msgpack.unpackb(open_envelope(data))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError(f"no description: {error or type(error).__name__}") from error
    if type(fields) is not list or len(fields) != 10 or fields[0] != _FORMAT:
        raise IntegrityError("no description that this release reads")
    _, its_rank, its_version, generation, path, chunk_bytes, start, packed, table, blob = fields
    numbers = (its_rank, its_version, generation, chunk_bytes, start)
    if any(type(number) is not int or not 0 <= number < _MAX_NUMBER for number in numbers):
        raise IntegrityError(f"a description with the numbers {numbers}")
    if (
        type(path) is not str
        or not path.startswith("/")
        or any(type(part) is not bytes for part in (packed, table, blob))
    ):
        raise IntegrityError("a description without path, layout, table or blob")
    if (its_rank, its_version) != (rank, version):
        raise IntegrityError(
            f"a description of version {its_version} of rank {its_rank}, not version {version} of rank {rank}"
        )
    if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise IntegrityError(f"a description with chunks of {chunk_bytes} bytes")
    try:
        layout = RankLayout.from_bytes(packed)
    except ProtocolError as error:
        raise IntegrityError(f"a description whose layout is none: {error}") from error
    if layout.rank != rank:
        raise IntegrityError(f"a description with the layout of rank {layout.rank}, not {rank}")
    cut = Cut.of(layout, chunk_bytes)
    if len(table) != 8 * cut.num_chunks:
        raise IntegrityError(f"a description of {cut.num_chunks} chunks with a table of {len(table)} bytes")
    checksums = struct.unpack(f"<{cut.num_chunks}Q", table)
    manifests = tuple(
        ExportManifest(
            path,
            rank,
            version,
            generation,
            one.layout.digest,
            stream.pieces,
            chunk_bytes,
            checksums[stream.first_chunk : stream.first_chunk + stream.num_chunks],
            stream.size_bytes,
            start + stream.offset,
        )
        for one, stream in zip(layout.sets, cut.streams, strict=True)
    )
    return SealedState(SealedVersion(version, generation), Path(path), blob, layout, manifests)
