"""One script that checks and times every kernel on the GPU at hand; `python -m benchmarks.device` (see __main__)."""
