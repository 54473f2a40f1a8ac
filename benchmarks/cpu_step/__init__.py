"""Step times on a CPU without a server's noise, beside those of others: `python -m benchmarks.cpu_step`."""
