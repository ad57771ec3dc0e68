"""Closing a listening socket without loss: no new handshake begins, and every waiting connection is accepted first.

A connection whose handshake is over waits in the kernel until it is accepted. Its caller may have sent a request
already, and closing the socket would reset it. So a filter drops the first packet (SYN) of new handshakes (the
caller's kernel sends it again after a second and is refused then, before anything was asked), and the connections in
the queue are accepted.

Source: Linux, socket(7) SO_ATTACH_FILTER, tcp(7) TCP_INFO (of a listening socket: ``tcpi_unacked`` is its queue).
"""

import ctypes
import logging
import socket
import struct

logger = logging.getLogger("halfeven")
_SO_ATTACH_FILTER = 26
_TCP_INFO_QUEUE = 24  # the offset of tcpi_unacked
# Classic BPF over the TCP header: load the flags; SYN without ACK is dropped (length 0), all else kept.
_NO_NEW_ONES = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # A = byte 13: the flags
        (0x54, 0, 0, 0x12),  # A &= SYN | ACK
        (0x15, 0, 1, 0x02),  # A == SYN?
        (0x06, 0, 0, 0),
        (0x06, 0, 0, 0x7FFFFFFF),
    )
)


def hold_off(listener: socket.socket) -> bool:
    """Let no new handshake begin. False where the system has no such filter: then a few connections may be reset."""
    program = ctypes.create_string_buffer(_NO_NEW_ONES)
    filter = struct.pack("HL", len(_NO_NEW_ONES) // 8, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)
    except OSError as error:
        logger.debug("new connections cannot be held off here: %s", error)
        return False
    return True


def waiting_in(listener: socket.socket) -> int:
    """Connections that wait to be accepted; 0 where the system does not tell."""
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_QUEUE + 4)
    except (OSError, AttributeError):  # only Linux has the constant
        return 0
    return struct.unpack_from("I", info, _TCP_INFO_QUEUE)[0] if len(info) >= _TCP_INFO_QUEUE + 4 else 0
