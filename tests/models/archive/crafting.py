"""Archives of programs whose members a test changed."""

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODEL = "archive/models/model.json"
WEIGHTS = "archive/data/weights/model_weights_config.json"
Change = Callable[[dict[str, Any]], None]


def contents(saved: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(saved) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def crafted(saved: Path, path: Path, member: str, change: Change) -> Path:
    """The archive with one of its JSON documents changed, at ``path``."""
    members = contents(saved)
    document = json.loads(members[member])
    change(document)
    path.write_bytes(archive_of({**members, member: json.dumps(document).encode()}))
    return path


class Touches:
    """An object that makes a file when it is unpickled without a guard."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)
