"""The places of other projects' clients, and the mark of a test that needs them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
WITHOUT_PEERS = pytest.mark.skipif(
    not (PEERS / "ready").exists(),
    reason="the peers' clients are not here: run `make peers` (`make check` does)",
)
