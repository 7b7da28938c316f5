"""Data-parallel training of one network by several frameworks: one job in files, one worker program a framework."""
