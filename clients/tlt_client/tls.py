"""TLS of a client: the servers that it trusts, and its own certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from os import PathLike

from tlt_client.errors import InvalidArgument


@dataclass(frozen=True)
class Tls:
    """PEM files. `ca` signed the server's certificate; None: the CAs that this machine trusts.
    `cert` and `key`: the client's own, for a server that requests a certificate.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context; raise `InvalidArgument` if the files are unusable."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument(
                f"cert is {self.cert} and key is {self.key}; give both, or neither"
            )
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"ca {self.ca}, cert {self.cert}, key {self.key} cannot be used ({error}); name "
                "PEM files, the key without a passphrase"
            ) from None
        return context
