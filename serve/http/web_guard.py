"""Protection from web pages: a page of another origin can neither change anything here nor read anything.

A browser sends a page's requests to any address, also to this machine's own. Two checks stop them. **Origin**: a
request that may change something and says that it comes from another origin is refused; browsers say so in ``Origin``
and ``Sec-Fetch-Site``, which no page can set. **Host**: a page whose own name was pointed at this server afterwards
(DNS rebinding) counts as the same origin, but its requests still carry its name; names that are not this server's are
refused, for reading too.

Source: Fetch standard, "Origin header"; W3C Fetch Metadata; RFC 9110 §7.4 and §15.5.20 (421); RFC 6761 (localhost).
"""

import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence

from .cross_origin import CrossOrigin
from .error_mapping import ForeignHost, ForeignPage

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(?::(\d{0,5}))?")
_ORIGIN = re.compile(r"(https?)://([^/?#@\s]+)")
_PORTS = {"http": "80", "https": "443"}
_OWN_PAGE = (b"same-origin", b"none")  # of Sec-Fetch-Site; none: typed or clicked by the user
_MOST_KNOWN = 256  # values of Host that are remembered; their length is bounded by _HOST
_EVERY = "*"
# Domains that no one can have in the public DNS: RFC 6761, RFC 6762 with its appendix G, RFC 8375; Kubernetes' own.
_PRIVATE_SUFFIXES = (
    ".localhost", ".local", ".internal", ".intranet", ".private", ".corp", ".home", ".lan", ".home.arpa", ".svc",
)  # fmt: skip
Headers = Sequence[tuple[bytes, bytes]]


class WebGuard:
    """``host`` is the address listened on, ``allowed`` further names of this server: ``name``, ``*.domain``, ``*``.

    Always allowed are the names of this machine's loopback and ``host`` itself, with any port. A server that listens
    beyond loopback also has addresses and names that the setting does not list (a pod's address in a health probe, a
    service's name): there any IP address is allowed, the machine's own name, and any name that no public DNS can give
    to a page. ``origins``: of pages that may ask (`cross_origin.py`).
    """

    def __init__(
        self, host: str = "127.0.0.1", allowed: Sequence[str] = (), origins: Sequence[str] = ()
    ) -> None:
        self.cross_origin = CrossOrigin(origins)
        self._beyond = not is_loopback(host)
        own = (host, socket.gethostname()) if self._beyond else (host,)
        self._names = frozenset(
            (*map(_plain_name, own), *(name for name in allowed if not name.startswith("*")))
        )
        self._suffixes = tuple(name[1:] for name in allowed if name.startswith("*."))
        self._every = _EVERY in allowed
        self._known: set[bytes] = set()

    def check(self, method: str, headers: Headers) -> None:
        """Raises ForeignHost, ForeignPage. Names of headers are in lower case, as ASGI gives them."""
        hosts, origins, sites = _values(headers)
        for host in hosts:
            if not self.knows(host):
                raise ForeignHost(
                    f"Host {_shown(host)} is not a name of this server: a web page may have been pointed at it. Ask "
                    "by localhost, an address or a name of the machine that the server knows, or start the server "
                    "with --allowed-hosts NAME"
                )
        if method in SAFE_METHODS:
            return
        if origins and all(map(self.cross_origin.allows, origins)):
            return
        for origin in origins:
            if not hosts or not all(_is_same_origin(origin, host) for host in hosts):
                raise ForeignPage(
                    f"Origin {_shown(origin)} is not this server: a web page of another origin changes nothing here. "
                    "Ask from a program, or let a proxy that stands between hand on the Host as it came"
                )
        for site in sites:
            if site.strip().lower() not in _OWN_PAGE:
                raise ForeignPage(
                    f"Sec-Fetch-Site {_shown(site)}: a web page of another origin changes nothing here; expected "
                    "same-origin, or none. Ask from a program"
                )

    @staticmethod
    def check_own_form(headers: Headers) -> None:
        """Raises ForeignPage unless the browser itself says that a page of this server sent the form. A form needs no
        JSON content type, which no page of another origin can send unasked: this stands in its place, also where
        ``origins`` are allowed."""
        hosts, origins, sites = _values(headers)
        if len(hosts) == 1 and (
            sites == [b"same-origin"]
            or (not sites and len(origins) == 1 and _is_same_origin(origins[0], hosts[0]))
        ):
            return
        raise ForeignPage(
            "this form is taken from the server's own pages alone (by Sec-Fetch-Site or Origin): a program sends JSON "
            "to the routes below /v1/models"
        )

    def knows(self, host: bytes) -> bool:
        """True if a Host header's value is a name of this server. The next time this is one look-up."""
        if host in self._known:
            return True
        if not self._is_ours(host):
            return False
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(host)
        return True

    def _is_ours(self, value: bytes) -> bool:
        found = _HOST.fullmatch(value.decode("latin-1").lower())
        if found is None:
            return False
        name = _plain_name(found[1])
        if self._every or is_loopback(name) or name in self._names or name.endswith(self._suffixes):
            return True
        return self._beyond and (_address(name) is not None or _is_private(name))


def is_loopback(host: str) -> bool:
    """True if the name or address is this machine's loopback, whatever a DNS says."""
    address = _address(host)
    if address is None:
        return _plain_name(host) == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def read_names(text: str) -> tuple[str, ...]:
    """Names separated by commas, in lower case. Raises ValueError naming an entry that is not a name."""
    names = [_plain_name(name.strip().lower()) for name in text.split(",") if name.strip()]
    for name in names:
        bare = name.removeprefix("*.")
        is_name = _address(bare) is not None if ":" in bare else _HOST.fullmatch(bare) is not None
        if name != _EVERY and not is_name:
            raise ValueError(
                f"{name[:80]!r} is no host's name: expected names like models.example.com, *.domain or *"
            )
    return tuple(names)


def _values(headers: Headers) -> Iterator[list[bytes]]:
    """The values of Host, of Origin and of Sec-Fetch-Site."""
    names = (b"host", b"origin", b"sec-fetch-site")
    return ([value for key, value in headers if key == name] for name in names)


def _is_same_origin(origin: bytes, host: bytes) -> bool:
    """True if scheme, name and port of the page are those that the request was sent to (by its Host)."""
    page = _ORIGIN.fullmatch(origin.decode("latin-1").lower())
    if page is None:  # null, a file, an extension
        return False
    theirs, ours = _HOST.fullmatch(page[2]), _HOST.fullmatch(host.decode("latin-1").lower())
    if theirs is None or ours is None:
        return False
    default = _PORTS[page[1]]  # TLS ends at a proxy: the page knows the scheme, the Host does not
    return (theirs[1], theirs[2] or default) == (ours[1], ours[2] or default)


def _plain_name(host: str) -> str:
    """The name in lower case, without the brackets of an IPv6 address and without a last dot."""
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_plain_name(host))
    except ValueError:
        return None


def _is_private(name: str) -> bool:
    """True if the name has no dot, or is below a domain that no one can have in the public DNS."""
    return "." not in name or name.endswith(_PRIVATE_SUFFIXES)


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
