"""Formats in which models think before they answer, one file each."""
