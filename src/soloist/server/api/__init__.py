"""The routes, one module per protocol: a request in that protocol's words to an `Ask`, and the answer back."""
