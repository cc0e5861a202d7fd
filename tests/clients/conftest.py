"""The server's fixtures, for clients too."""

from tests.server.conftest import serve

__all__ = ["serve"]
