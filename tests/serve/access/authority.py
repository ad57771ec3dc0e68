"""An authority made for one test, and a server's certificate and key in two files."""

import datetime
import ssl
from pathlib import Path

import trustme


class Pair:
    """An authority and the two files of the server."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.authority = trustme.CA()
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.renew()

    def renew(self, days: float = 30) -> bytes:
        """Write a new pair, which is valid from yesterday on until so many days from now; the certificate as it is
        sent."""
        now = datetime.datetime.now(datetime.UTC)
        begin, end = (now + datetime.timedelta(days=count) for count in (min(days, 0) - 1, days))
        issued = self.authority.issue_cert("localhost", "127.0.0.1", not_before=begin, not_after=end)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        for path, content in ((self.key, issued.private_key_pem.bytes()), (self.certificate, chain)):
            draft = path.with_suffix(".draft")
            draft.write_bytes(content)
            draft.replace(path)
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def trusting(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context
