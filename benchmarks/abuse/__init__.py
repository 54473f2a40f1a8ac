"""Everything at once that a server on a network has to endure: see `benchmarks.abuse.__main__`."""
