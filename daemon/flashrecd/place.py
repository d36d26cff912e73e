"""What the ranks of a node must know of it, where a job runs on several."""

from dataclasses import dataclass, replace

from flashrec.protocol import messages as msg


@dataclass(frozen=True, kw_only=True)
class Place:
    """What this node's processes must know of it: see messages.Welcome."""

    data_address: str
    shard_address: str
    replica_address: str
    key_file: str
    plain_bulk: bool

    def filled_in(self, welcome: msg.Welcome) -> msg.Welcome:
        return replace(
            welcome,
            shard_address=self.shard_address,
            data_address=self.data_address,
            replica_address=self.replica_address,
            key_file=self.key_file,
            plain_bulk=self.plain_bulk,
        )
