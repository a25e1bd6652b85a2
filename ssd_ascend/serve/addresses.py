"""Where a server listens, and what a client calls it by. For the server, and for the router before several."""

from __future__ import annotations

import errno
import socket

from ssd_ascend.errors import ConfigError

_BACKLOG = 2048


def bind(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError, which names the flag that gave the port, when
    the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken by another program", remedy=f"choose another with {flag}, or 0 for any"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", remedy=f"see {flag}") from error
    return sock


def url_of(host: str, port: int) -> str:
    """The URL of who listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
