"""The usual methods to train the same networks, timed on the same weights, rows and order."""
