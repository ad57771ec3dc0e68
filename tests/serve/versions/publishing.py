"""Versions that are published without a conversion."""

from pathlib import Path

import numpy as np
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.archive.archive import save_program
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import LIVE, Store, Version
from safetensors.torch import save_file

from tests.programs import Original


def publish(store: Store, text: str) -> int:
    """A version of small files."""
    with store.draft("net") as draft:
        (draft.folder / "original.pt2").write_text(text)
        (draft.folder / "source").mkdir()
        (draft.folder / "source" / "model.py").write_text("# " + text)
        return draft.publish(LIVE, {}).number


def publish_net(
    root: Path, net: Original, halves: tuple[str, ...] = (), spec: ModelSpec | None = None
) -> Version:
    """A version of a program, with halves that are said to have passed, whose files are none: loading one fails."""
    with Store(root).draft("net") as draft:
        draft.write_json("spec.json", (spec or net.spec).to_json())
        save_program(net.program, draft.folder / "original.pt2", weights=False)
        save_file(dict(net.program.state_dict), draft.folder / "weights.safetensors")
        rows = np.random.default_rng(0).random((8, 3), np.float32)
        Samples({"input": rows}).save(draft.folder / "samples.safetensors")
        for file in ("original.onnx", "half.pt2", "half.onnx") if halves else ():
            (draft.folder / file).write_bytes(file.encode())
        forms = {form: {"passed": True} for form in halves}
        return draft.publish(LIVE, {"half": "fp16" if halves else None, "forms": forms, "reason": ""})
