"""docker/systemd: the unit is one that systemd takes, and starts the server with settings that it has."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from halfeven.serve.settings import Settings

from tests.patience import PATIENCE_S

UNIT = Path(__file__).resolve().parent.parent / "docker/systemd/halfeven.service"


def values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here (apt: systemd)"
)
@pytest.mark.parametrize(("planted", "fault"), [("", ""), ("Typo=1", "Typo"), ("Restart=some", "some")])
def test_systemd_takes_the_unit_and_would_say_what_is_wrong(planted: str, fault: str, tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/halfeven/bin/halfeven", sys.executable)
    (tmp_path / UNIT.name).write_text(text.replace("[Service]", f"[Service]\n{planted}"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert [fault in line for line in ours] == ([True] if fault else []), done.stderr


def test_it_serves_from_its_own_folder_and_stops_when_everything_is_answered() -> None:
    assert values("ExecStart") == ["/opt/halfeven/bin/halfeven serve"]
    given = dict(pair.split("=", 1) for pair in values("Environment")[0].split())
    settings = {f"HALFEVEN_{name.upper()}": name for name in Settings.model_fields}
    ours = {settings[name]: value for name, value in given.items() if name.startswith("HALFEVEN_")}
    read = Settings(**ours)  # type: ignore[arg-type]
    assert str(read.store) == f"/var/lib/{values('StateDirectory')[0]}"
    assert given["XDG_CACHE_HOME"] == f"/var/cache/{values('CacheDirectory')[0]}"
    assert float(values("TimeoutStopSec")[0]) > read.drain_seconds + read.shutdown_seconds
    assert values("KillMode") == ["mixed"], "a trainer gets no SIGTERM of its own"
