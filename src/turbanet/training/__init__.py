"""How a swarm is trained: what one member computes, which rows it sees, where it runs; no architecture, no score."""
