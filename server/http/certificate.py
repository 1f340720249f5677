"""The certificate of a TLS server, which is read again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import uvicorn

logger = logging.getLogger(__name__)


def load_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Returns a TLS context with a certificate.

    Args:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with the private key, without a password; None: the key is in `certificate`.

    Raises:
        OSError: A file cannot be read, or the certificate and the key cannot be used. Includes ssl.SSLError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")  # without a password OpenSSL would ask on the terminal
    return context


class Certificate:
    """Gives each new connection the current certificate. Open connections keep theirs.

    Args:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with the private key, without a password; None: the key is in `certificate`.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._current: ssl.SSLContext | None = None  # None: the context of the connection has the certificate
        self._read_version = self._seen_version = self._version()

    def attach(self, context: ssl.SSLContext) -> None:
        """Makes the connections of a context use the current certificate."""
        context.sni_callback = self._select

    def reload_if_changed(self) -> None:
        """Reads the files again if they have changed. Call it about once per second.

        The files are read when two calls in a row see the same change, because a tool may still write the second one.
        """
        version, last_version = self._version(), self._seen_version
        self._seen_version = version
        if version != self._read_version and version == last_version:
            self.reload()

    def reload(self) -> None:
        """Reads the files again. If they cannot be used, an error is logged and the previous certificate stays."""
        self._read_version = self._seen_version = self._version()
        try:
            self._current = load_certificate(self._certificate, self._key)
        except OSError as error:
            logger.error("--ssl-certfile, --ssl-keyfile: %s; the previous certificate stays in use", error)
        else:
            logger.info("--ssl-certfile: read again; new connections use the certificate in %s", self._certificate)

    def _select(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        if self._current is not None:
            connection.context = self._current

    def _version(self) -> tuple[tuple[int, int, int], ...]:
        """Returns the times, sizes and inodes of the files; () if a file is missing."""
        files = [self._certificate] if self._key is None else [self._certificate, self._key]
        try:
            return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in (file.stat() for file in files))
        except OSError:  # missing, while a tool replaces it
            return ()


def certificate_of(config: uvicorn.Config) -> Certificate | None:
    """Returns the certificate in the configuration of uvicorn; None without TLS."""
    if config.ssl_certfile is None:
        return None
    return Certificate(Path(config.ssl_certfile), None if config.ssl_keyfile is None else Path(config.ssl_keyfile))
