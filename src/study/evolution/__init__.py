"""Evolution and population-based training, and their peers."""
