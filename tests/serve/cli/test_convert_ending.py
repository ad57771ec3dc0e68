"""The last lines of `halfeven convert`: what is served here and why, the report, the next command."""

from pathlib import Path
from typing import Any

import pytest
from halfeven.models.machine.processor import this_processor
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import LIVE, REFUSED, Store, Version
from halfeven.serve.cli import convert_ending
from halfeven.serve.cli.convert_ending import ending

PASSED = {"torch": {"passed": True}, "onnx": {"passed": True}}


def published(store: Path, form: str = "auto", status: str = LIVE, half: str | None = "fp16") -> Version:
    spec = ModelSpec("net", (), (), form=form)
    facts: dict[str, Any] = {
        "forms": PASSED if status == LIVE else {},
        "half": half,
        "reason": "",
        "notes": [],
    }
    opened = Store(store)
    with opened.draft("net") as draft:
        draft.write_json("spec.json", spec.to_json())
        version = draft.publish(status, facts)
    if status == LIVE:
        opened.promote(version)
    return version


def test_the_lines_name_the_report_and_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, more in (("halfeven-store", ""), ("other", " --store other")):
        version = published(tmp_path / given, "torch")
        lines = ending(version, Store(tmp_path / given), tmp_path, Path(given), None)
        assert lines == [
            'served here: the proven FP16 half, because form = "torch" asks for it',
            f"report: {given}/models/net/1/report.html",
            f"next: halfeven serve{more}",
        ]
    asked = ending(version, Store(tmp_path / given), tmp_path, Path(given), Path("page.html"))
    assert asked[1] == "report: page.html"


@pytest.mark.parametrize(
    ("status", "half", "words"),
    [
        (REFUSED, "fp16", "the FP32 original, because no half is proven"),
        (LIVE, None, "FP32, because nothing is half"),
    ],
)
def test_where_there_is_no_half_fp32_is_served(
    status: str, half: str | None, words: str, tmp_path: Path
) -> None:
    version = published(tmp_path, status=status, half=half)
    assert words in ending(version, Store(tmp_path), tmp_path, tmp_path, None)[0]


def test_a_refused_version_leaves_the_active_one(tmp_path: Path) -> None:
    published(tmp_path)
    second = published(tmp_path, status=REFUSED)
    said = ending(second, Store(tmp_path), tmp_path, tmp_path, None)[0]
    assert said == "served here: version 1, which stays active; this one is refused"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_where_measurement_decides_it_is_said_what_is_likely(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(convert_ending, "resolve_device", lambda _: torch.device(device))
    version, file = published(tmp_path), tmp_path / "net.onnx"
    file.write_bytes(b"")
    assert (
        f"in the model.toml that `halfeven init {file}` writes serves"
        in ending(version, Store(tmp_path), file, tmp_path, None)[0]
    )
    (tmp_path / "model.toml").write_text("")
    said = ending(version, Store(tmp_path), file, tmp_path, None)[0]
    unlikely = device == "cpu" and "fp16" not in this_processor().units()
    assert ("probably FP32" in said) == unlikely
    assert ("(--dtype bf16)" in said) == (unlikely and "bf16" in this_processor().units())
    assert "measures it 1.1 times as fast" in said and 'form = "torch" in model.toml serves' in said
