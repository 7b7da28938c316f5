"""Clock, facts on the machine, time of compilation, the machine's peak rates."""
