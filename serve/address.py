"""The address of a listener as a URL has it."""


def address(host: str, port: int) -> str:
    """``host:port``; an IPv6 address in brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
