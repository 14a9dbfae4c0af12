"""Ports of this machine."""

import errno
import socket

from fedseal.errors import UserError


def check_port(host: str, port: int) -> None:
    """Raises if this process cannot listen on a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "choose another --port" if taken else "check the host"
        raise UserError(f"Cannot listen on {host}:{port} ({error.strerror}): {advice}.") from error
