"""Correlated noise for private prefix sums, one interface for every mechanism."""
