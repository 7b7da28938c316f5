"""A swarm over machines: costs of a cluster, plain Ray and joblib for comparison, a projection to many machines."""
