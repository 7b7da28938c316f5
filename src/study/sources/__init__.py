"""Data sets: where each comes from, how it is checked, what is written down of it; no training, no splits."""
