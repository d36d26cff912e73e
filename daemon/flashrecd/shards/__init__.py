"""The shard server: sealed bytes of this node, served to other nodes."""
