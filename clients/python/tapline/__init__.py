"""A client of the Tapline daemon.

    import tapline
    client = tapline.Client()
    disk = client.wait(client.vdi_create(sr=sr, name="web", size=20 << 30))["uuid"]

Each operation of the API is a method with the API's name, fields and answers (docs/api.md).
"""

from ._operations import Operations
from ._transport import SOCKET, UNSET, Problem, Unreachable

__all__ = ["SOCKET", "UNSET", "Client", "Problem", "Unreachable"]


class Client(Operations):
    """A daemon: at its Unix socket on this host, or at `url` with a `token` and the certificate of its `ca`."""
