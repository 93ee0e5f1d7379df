"""Data, models, loops, checkpoints and command lines of the three systems."""
