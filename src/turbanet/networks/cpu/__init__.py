"""Operations of layers with gradients of our own, where XLA's are slow in a swarm on a CPU."""
