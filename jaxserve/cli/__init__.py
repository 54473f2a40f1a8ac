"""The command line: `jaxserve serve | generate | chat | convert | check-env`."""
