"""The study's bench: what the notebooks need and a library user does not."""
