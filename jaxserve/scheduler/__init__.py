"""Scheduling: which requests take part in which step. NumPy only; execution is behind the Runner protocol."""
