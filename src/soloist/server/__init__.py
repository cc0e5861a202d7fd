"""The HTTP server: the protocols that clients speak, one listener at a time. Only the command line imports it."""
