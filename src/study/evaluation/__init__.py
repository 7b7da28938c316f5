"""Splits without look-ahead, and scores with their intervals."""
