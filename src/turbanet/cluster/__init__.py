"""A swarm over many machines: its members in shards, each a task of Ray's."""
