"""Formats in which models call tools, one file each."""
