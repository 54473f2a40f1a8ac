"""Timing of kernels on the device at hand: what `jaxserve bench` and the repository's device benchmark share."""
