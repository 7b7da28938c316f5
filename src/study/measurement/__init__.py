"""The clock, the machine's facts, what compilation costs, how fast the machine could be."""
