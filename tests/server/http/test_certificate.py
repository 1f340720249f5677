"""The files of a certificate change while the server runs."""

import logging
import shutil
import ssl
from pathlib import Path

import pytest

from penstock.server.http.certificate import Certificate, load_certificate

Pair = tuple[Path, Path]


def served_certificate(context: ssl.SSLContext) -> bytes:
    """Returns the certificate that a new connection gets. The client sends no host name."""
    client_context = ssl.create_default_context()
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def test_changed_files_are_read_when_they_are_complete(
    certificate: Pair, renewed_certificate: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = certificate, renewed_certificate
    files = shutil.copy(first[0], tmp_path / "cert.pem"), shutil.copy(first[1], tmp_path / "key.pem")
    context = load_certificate(*files)
    watched = Certificate(*files)
    watched.attach(context)

    def name() -> str:
        served = served_certificate(context)
        return "first" if served == ssl.PEM_cert_to_DER_cert(first[0].read_text()) else "second"

    for _ in range(3):
        watched.reload_if_changed()
    assert (name(), caplog.messages) == ("first", [])
    shutil.copy(second[0], files[0])
    watched.reload_if_changed()
    shutil.copy(second[1], files[1])
    watched.reload_if_changed()
    assert name() == "first"  # the files have changed since the last call
    watched.reload_if_changed()
    assert name() == "second"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    files[1].unlink()
    shutil.copy(first[0], files[0])
    for _ in range(4):
        watched.reload_if_changed()
    assert name() == "second"
    (record,) = caplog.records[1:]
    assert (record.levelname, "the previous certificate stays in use" in record.getMessage()) == ("ERROR", True)
    shutil.copy(first[1], files[1])
    watched.reload()
    assert name() == "first"
