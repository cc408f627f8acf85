"""Finds the address by which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress


def own_address(host: str) -> str:
    """The address of the interface by which this machine reaches `host`.

    Raises:
        OSError: Its name is not known, or no way leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def reached_by(hosts: Iterable[str]) -> str:
    """This machine's address on the way to the first of these hosts that is another machine.

    A machine's own name says little: Debian gives it a loopback address.

    Args:
        hosts: Names or addresses; as many are looked at as needed.

    Returns:
        An address, or this machine's name where none of these is another.
    """
    for host in hosts:
        with suppress(OSError):
            own = own_address(host)
            if not ipaddress.ip_address(own).is_loopback:
                return own
    return socket.gethostname()
