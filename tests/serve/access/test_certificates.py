"""TLS: what a caller sees, and a certificate that is renewed while the server runs. Each test has its own authority."""

import logging
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from halfeven.models.errors import BadSetting
from halfeven.serve.access.certificates import Certificates
from halfeven.serve.settings import read_settings

from tests.patience import PATIENCE_S
from tests.serve.access.authority import Pair
from tests.serve.conftest import ASKED, front_of, make_roster, started


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@contextmanager
def serving(pair: Pair) -> Iterator[int]:
    """The port of the application behind TLS, on the server that `halfeven serve` runs."""
    with started(
        front_of(make_roster()), tls=Certificates(pair.certificate, pair.key).server_context()
    ) as server:
        yield server.servers[0].sockets[0].getsockname()[1]


def shown(port: int, context: ssl.SSLContext, name: str) -> bytes:
    """The certificate that the server shows to a new connection. An address is no server name in the handshake."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        certificate = secured.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


@pytest.mark.slow
def test_every_route_answers_over_tls_and_nothing_over_plain_http(pair: Pair) -> None:
    with serving(pair) as port, httpx.Client(verify=pair.trusting(), timeout=PATIENCE_S) as client:
        url = f"https://127.0.0.1:{port}"
        for _ in range(3):  # the second and third from the head that is known
            answer = client.post(f"{url}/v2/models/double/infer", json=ASKED)
            assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert client.get(f"{url}/v1/models").status_code == 200
        large = {**ASKED, "id": "7" * 3_000_000}
        answer = client.post(f"{url}/v2/models/double/infer", json=large)
        assert answer.json()["id"] == large["id"], "many records of TLS, there and back"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE_S)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz", timeout=PATIENCE_S)  # an authority that this caller does not trust


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"], ids=["with a server name", "without one"])
def test_a_renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on(pair: Pair, name: str) -> None:
    first = pair.renew()
    with serving(pair) as port, httpx.Client(verify=pair.trusting(), timeout=PATIENCE_S) as old:
        assert old.get(f"https://localhost:{port}/healthz").status_code == 200
        assert shown(port, pair.trusting(), name) == first
        second = pair.renew()
        assert shown(port, pair.trusting(), name) == second != first
        assert old.get(f"https://localhost:{port}/healthz").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["another key", "no pair", "gone", "expired"])
def test_a_new_pair_that_cannot_be_used_is_not_taken_and_the_next_good_one_is(
    pair: Pair, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = pair.renew()
    with serving(pair) as port:
        if fault == "another key":
            pair.key.write_bytes(pair.authority.issue_cert("localhost").private_key_pem.bytes())
        elif fault == "no pair":
            pair.certificate.write_text("nonsense")
        elif fault == "expired":
            pair.renew(days=-1)
        else:
            pair.certificate.unlink()
        with caplog.at_level(logging.ERROR):
            assert [shown(port, pair.trusting(), "localhost") for _ in range(2)] == [first] * 2
        assert caplog.text.count("not taken") == 1 and "PRIVATE" not in caplog.text
        second = pair.renew()
        assert shown(port, pair.trusting(), "localhost") == second != first


def test_an_expired_certificate_is_shown_with_a_warning_until_a_better_one_comes(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.renew(days=-1)
    certificates = Certificates(pair.certificate, pair.key)
    assert "callers refuse the certificate" in caplog.text and "expired" in caplog.text
    first = certificates.current()
    pair.renew(days=-2)
    assert certificates.current() is not first, "callers refuse both: the newer one it is"
    caplog.clear()
    pair.renew()
    certificates.current()
    assert caplog.text == ""


def test_old_versions_of_tls_are_refused(pair: Pair) -> None:
    context = Certificates(pair.certificate, pair.key).server_context()
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_that_are_no_pair_end_the_start_with_a_sentence(pair: Pair, tmp_path: Path) -> None:
    def settings(**more: Path) -> object:
        return read_settings(**more).certificates

    assert settings() is None
    assert settings(tls_cert=pair.certificate, tls_key=pair.key) is not None
    for only in ({"tls_cert": pair.certificate}, {"tls_key": pair.key}):
        with pytest.raises(BadSetting, match="needed together"):
            settings(**only)
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path / "none", tmp_path / "pipe", pair.key):
        with pytest.raises(BadSetting, match="--tls-cert"):
            settings(tls_cert=wrong, tls_key=pair.key)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(pair: Pair) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(BadSetting, match="not encrypted"):
        Certificates(pair.certificate, pair.key)


def test_a_new_pair_is_taken_when_its_key_becomes_readable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that renews certificates writes the key for its owner alone, and lets the server read it afterwards."""
    made = Certificates._context

    def context(certificates: Certificates) -> ssl.SSLContext:
        if pair.key.stat().st_mode & 0o077 == 0:  # as the system says to another user; a test may be root
            raise PermissionError(13, "Permission denied")
        return made(certificates)

    pair.key.chmod(0o640)
    monkeypatch.setattr(Certificates, "_context", context)
    certificates = Certificates(pair.certificate, pair.key)
    before = certificates.current()
    pair.renew()
    pair.key.chmod(0o600)
    assert certificates.current() is before
    pair.key.chmod(0o640)
    assert certificates.current() is not before


def test_the_bytes_of_a_pair_are_those_that_fit_together(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes bytes. A certificate is renewed between the look at the pair and the reading of its bytes."""
    certificates, old = Certificates(pair.certificate, pair.key), (pair.key, pair.certificate)
    before = tuple(path.read_bytes() for path in old)
    other, made = Pair(tmp_path / "other"), Certificates._context

    def context(one: Certificates) -> ssl.SSLContext:
        found = made(one)
        if other.certificate.exists():
            other.certificate.replace(pair.certificate)
        return found

    monkeypatch.setattr(Certificates, "_context", context)
    os.utime(pair.key)
    for _ in range(2):
        certificates.current()
        assert certificates.pem() == before, "the new certificate has no key yet"
    other.key.replace(pair.key)
    assert certificates.pem() == tuple(path.read_bytes() for path in old) != before
