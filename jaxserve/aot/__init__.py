"""Ahead-of-time compilation for hardware that is not at hand: what a chip is to its compiler, and what the compiler reports."""
