"""A swarm over machines: what a cluster costs and saves, plain Ray and joblib beside it, many machines projected."""
