"""Data sets: sources, checks and provenance; no training, no splits."""
