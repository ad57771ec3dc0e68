"""The certificate and the private key that the server shows: two files, read again when they change.

Each new connection looks at the files (two calls of stat, beside a handshake that takes a thousand times as long), so
a renewed certificate needs no signal and no timer. Certificate and key are two files and are rarely replaced at
once: a pair that does not fit together is not taken, and the one before goes on. Nor is one that every caller would
refuse, because it has expired for example, while callers take the one before; the first pair is taken with a warning.

Source: `ssl.SSLContext.sni_callback`, which is called for every handshake, with or without a server name.
"""

import logging
import ssl
from pathlib import Path

from ...models.errors import BadSetting
from ...models.files.opened_file import opened_named

Stamp = tuple[tuple[int, int, int, int], ...]
_LOG = logging.getLogger(__name__)


class Certificates:
    """One pair of PEM files; the key must not be encrypted. Raises BadSetting where they are no pair at the start."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._stamp = self._look()
        self._said = ""
        try:
            self._current, self._pem = self._read()
        except (OSError, ValueError) as error:
            raise BadSetting(
                f"--tls-cert {certificate} and --tls-key {key} cannot be used: {_words(error)}; expected a PEM file "
                "with the certificate and those that signed it, and one with its private key, which is not encrypted"
            ) from None
        if why := self._refused_by_callers():
            _LOG.warning("callers refuse the certificate %s: %s", certificate, why)

    def server_context(self) -> ssl.SSLContext:
        """The context to listen with; every handshake has the pair that is in the files then."""
        outer = self._context()

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self.current()

        outer.sni_callback = choose
        return outer

    def current(self) -> ssl.SSLContext:
        """The context of the newest pair that fits together."""
        stamp = self._look()
        if stamp != self._stamp:
            before = self._current, self._pem
            try:
                self._current, self._pem = self._read()
                self._stamp = stamp
                if (why := self._refused_by_callers()) and not _refused(*before):
                    self._current, self._pem = before
                    self._refuse(f"callers refuse it: {why}")
                else:
                    self._said = ""
            except (OSError, ValueError) as error:
                # This fault lasts until a file changes; another one may be over at the next look.
                if isinstance(error, ssl.SSLError):
                    self._stamp = stamp
                self._refuse(_words(error))
        return self._current

    def pem(self) -> tuple[bytes, bytes]:
        """(private key, certificate) of the newest pair that fits together, as they were in the files."""
        self.current()
        return self._pem

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        """The context of the pair in the files, and its bytes. Raises OSError and ValueError, also where a file is
        replaced meanwhile: the bytes could be of another pair then."""
        before = self._look()
        certificate, key = self._files
        with opened_named(certificate) as one, opened_named(key) as other:
            pem = other.read(), one.read()
        context = self._context()
        if self._look() != before:
            raise ValueError("a file was replaced while they were read")
        return context, pem

    def _refused_by_callers(self) -> str:
        return _refused(self._current, self._pem)

    def _refuse(self, why: str) -> None:
        """Log that the new pair is not taken, once for each reason."""
        if why != self._said:
            self._said = why
            _LOG.error(
                "the new pair of %s and %s is not taken: %s; the one before goes on", *self._files, why
            )

    def _look(self) -> Stamp:
        """Facts of both files, which change when a file is replaced or its permissions change; empty where the facts of
        a file cannot be read."""
        try:
            found = [path.stat() for path in self._files]
        except OSError:
            return ()
        return tuple((one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_size) for one in found)

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL would ask for a password on the terminal if it had no function for it.
        context.load_cert_chain(*self._files, password=lambda: "")
        return context


def _refused(context: ssl.SSLContext, pem: tuple[bytes, bytes]) -> str:
    """The reason why a caller that trusts this very certificate refuses it now, in OpenSSL's words (its dates, its
    purpose); empty where the caller accepts it. The caller is one in memory."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cadata=pem[1].decode("ascii", "ignore"))
    to_server, to_caller = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = trusting.wrap_bio(to_caller, to_server)
    server = context.wrap_bio(to_server, to_caller, server_side=True)
    for side in (caller, server, caller):
        try:
            side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLWantReadError:
            continue
    return ""


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
