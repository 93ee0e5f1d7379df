"""Keyboard language models trained by simulated federated learning with DP-FTRL."""
