"""Architectures of one network in plain Flax, and the products that make them fast in a swarm; none knows of swarms."""
