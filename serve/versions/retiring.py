"""The end of loaded versions: their waiting requests are answered, their engines closed, the memory given back."""

import asyncio
import logging
import threading
from collections.abc import Iterable

from .loading.release import give_back
from .traffic.loaded_version import DRAIN_SECONDS, LoadedVersion

logger = logging.getLogger("halfeven.roster")


def retire(loaded_versions: Iterable[LoadedVersion], loop: asyncio.AbstractEventLoop | None) -> None:
    """Answer the waiting requests, close the versions and free the memory. The caller must keep no reference."""
    retired = False
    for loaded in loaded_versions:
        if _drained(loaded, loop):
            loaded.close()
            logger.info("%s is closed", loaded)
        retired = True
    del loaded_versions
    if retired:
        give_back()


async def drain(loaded_versions: Iterable[LoadedVersion], timeout_s: float) -> None:
    """Refuse new requests and answer those that wait: at the end of the server, on its event loop."""
    for loaded in loaded_versions:
        try:
            await asyncio.wait_for(loaded.drain("the server is shutting down; ask another one"), timeout_s)
        except TimeoutError:
            logger.error("%s did not answer its waiting requests within %g s", loaded, timeout_s)


def _drained(loaded: LoadedVersion, loop: asyncio.AbstractEventLoop | None) -> bool:
    """Answer the waiting requests, on the event loop. False where that takes too long: the version is closed later."""
    if loop is None or loop.is_closed():
        asyncio.run(loaded.drain())
        return True
    done = asyncio.run_coroutine_threadsafe(loaded.drain(), loop)
    try:
        done.result(DRAIN_SECONDS)
    except TimeoutError:
        logger.error(
            "%s has not answered its waiting requests within %g s; it stays until it has",
            loaded,
            DRAIN_SECONDS,
        )
        done.add_done_callback(lambda _: threading.Thread(target=loaded.close, daemon=True).start())
        return False
    return True
