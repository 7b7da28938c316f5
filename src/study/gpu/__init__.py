"""The study on a GPU: what `make gpu` measures there in minutes, and the report's chapter on it."""
