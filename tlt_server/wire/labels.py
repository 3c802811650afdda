"""Names that the server gives to versions, and labels: version names of the borrowed dialects, each
of which refers to the last push under it.

A version's own name stands for one content, which caches, spans and restarts rely on. So if a label
already names other content, new content gets the label plus its digest as its name. Replies in a
borrowed dialect show the label; the version spans of a reply show the name.
"""

from __future__ import annotations

import re

from tlt_client.arguments import MAX_VERSION, UNSEEN

DIGITS = 12  # hexadecimal digits of the digest in a name
_APART = re.compile(rf"(.+)~[0-9a-f]{{{DIGITS}}}", re.DOTALL)


def apart(label: str, digest: str) -> str:
    """Return the name of the content with this digest under a label that has other content."""
    return f"{label[: MAX_VERSION - DIGITS - 1]}~{digest[:DIGITS]}"


def unnamed(origin: str, digest: str) -> str:
    """Return the name of content from this origin without a version."""
    return f"{re.sub(f'[+{UNSEEN}]', '_', origin)}@{digest[:8]}"


def label_of(version: str) -> str:
    """Return a borrowed dialect's name for a version."""
    found = _APART.fullmatch(version)
    return found[1] if found else version
