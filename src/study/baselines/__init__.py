"""The usual ways to train the same networks, from the same weights on the same rows in the same order, timed."""
