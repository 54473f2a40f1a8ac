"""The HTTP server: the app and what every route shares - bodies, errors, limits, keys, health."""
