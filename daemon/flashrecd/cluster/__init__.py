"""Several daemons as one cluster: membership, messages between the leader and its members, who reaches whom."""

from flashrecd.cluster.check import PairReport
from flashrecd.cluster.cluster import Cluster
from flashrecd.cluster.info import NodeInfo
from flashrecd.cluster.options import ClusterOptions

__all__ = ["Cluster", "ClusterOptions", "NodeInfo", "PairReport"]
