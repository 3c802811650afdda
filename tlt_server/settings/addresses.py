"""Addresses that the server listens on, and the names by which browsers know it and other sites."""

from __future__ import annotations

import ipaddress
import re

PORTS = {"http": "80", "https": "443"}  # scheme -> the port that addresses leave out
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")


def is_origin(text: str) -> bool:
    """Return True if the text has a browser's form of an Origin: lower case, with a port only if it
    is not the scheme's default.
    """
    parts = _ORIGIN.fullmatch(text)
    return parts is not None and (parts[2] is None or parts[2] != PORTS.get(parts[1]))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
