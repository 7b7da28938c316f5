"""Train a swarm on many machines: its members in shards, each a Ray task."""

from turbanet.cluster.driver import fit
from turbanet.cluster.results import ClusterHistory, ClusterResults, ShardsFailed
from turbanet.cluster.settings import Cluster

__all__ = [
    "Cluster",
    "ClusterHistory",
    "ClusterResults",
    "ShardsFailed",
    "fit",
]
