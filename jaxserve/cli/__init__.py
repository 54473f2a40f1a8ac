"""The command line: `jaxserve serve | generate | chat | convert | compile | check-env | bench`."""
