"""What all else stands on: one member and its state, arrays, identity, where members run, the memory they have."""
