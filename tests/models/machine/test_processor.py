"""The facts about a processor are asked in one place, and what is decided by them is tested with given ones."""

import ast
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from halfeven.exporters.on_device import environment
from halfeven.models.engines.cpu import packed
from halfeven.models.machine import processor
from halfeven.models.machine.processor import Processor, hardware
from halfeven.serve.cli import doctor
from torch import nn

from tests.house_sources import ROOT, nodes_with
from tests.slow import one_in_turn

PROCESSORS = {
    "AVX2": Processor("A", "x86_64", "AVX2"),
    "AVX-512": Processor("B", "x86_64", "AVX512"),
    "AVX-512 with bf16": Processor("C", "x86_64", "AVX512", bf16_kernels=True, bf16_units=True),
    "AVX-512 with FP16, and AMX": Processor(
        "D", "x86_64", "AVX512", bf16_kernels=True, fp16_kernels=True, bf16_units=True, fp16_units=True
    ),
    "AVX2 that converts halves": Processor("F", "x86_64", "AVX2", bf16_kernels=True, converts_halves=True),
    "restricted to AVX-512": Processor("D", "x86_64", "AVX512", "AVX512_CORE", bf16_units=True),
    "without oneDNN": Processor("E", "aarch64", "DEFAULT", onednn=False),
}
KINDS = {
    "AVX2": "cpu x86_64 AVX2, oneDNN",
    "AVX-512": "cpu x86_64 AVX512, oneDNN",
    "AVX-512 with bf16": "cpu x86_64 AVX512, oneDNN, bf16",
    "AVX-512 with FP16, and AMX": "cpu x86_64 AVX512, oneDNN, bf16, fp16",
    "AVX2 that converts halves": "cpu x86_64 AVX2, oneDNN, converted halves",
    "restricted to AVX-512": "cpu x86_64 AVX512, oneDNN, bf16, up to AVX512_CORE",
    "without oneDNN": "cpu aarch64 DEFAULT",
}
# The calls that ask torch which instructions or kernels there are.
ASKING = (
    "get_cpu_capability",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
    "_is_avx",
    "_is_amx",
    "_is_vnni",
)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_proof_is_bound_to_the_kernels_of_the_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "hardware", lambda: PROCESSORS[name])
    assert environment.environment(torch.device("cpu"))["device"] == KINDS[name]


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_types_that_are_packed_are_those_with_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "this_processor", lambda: PROCESSORS[name])
    given = PROCESSORS[name]
    for dtype, expected in {
        torch.float32: given.onednn,
        torch.bfloat16: given.bf16_kernels,
        torch.float16: False,
    }.items():
        program = torch.export.export(
            nn.Linear(512, 512, dtype=dtype).eval(), (torch.randn(4, 512, dtype=dtype),)
        )
        assert bool(packed.packable(program.module())) is expected, dtype


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_doctor_names_the_types_that_the_processor_multiplies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "this_processor", lambda: PROCESSORS[name])
    monkeypatch.setattr(doctor, "costs_here", lambda dtype: {})
    found = {check["what"]: check for check in doctor.examine(Path("no-store"))["checks"]}["cpu"]
    units = PROCESSORS[name].units()
    assert found["found"].endswith(", ".join([PROCESSORS[name].instructions, *units]))
    assert ("itself" in found["advice"]) is bool(units)


def test_a_restricted_onednn_is_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert str(hardware.__wrapped__()).endswith(", oneDNN up to AVX2")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*one_in_turn(["avx2", "AVX2"], 0), "default"])
def test_the_instructions_are_those_that_torch_uses(asked: str) -> None:
    """Found without torch: the proof of an ONNX file is the same where torch is not installed."""
    code = (
        "import torch; from halfeven.models.machine.processor import hardware as found; "
        "print(found().instructions, torch.backends.cpu.get_cpu_capability())"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": asked}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    here = [hardware().instructions, torch.backends.cpu.get_cpu_capability()]
    for ours, theirs in (done.stdout.split(), here):
        assert ours == theirs or not sys.platform.startswith("linux") or platform.machine() != "x86_64"


def test_a_torch_without_onednn_is_a_processor_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.setattr(processor, "hardware", lambda: PROCESSORS["AVX-512"])
    found = processor.this_processor.__wrapped__()
    assert not (found.onednn or found.bf16_kernels or found.fp16_kernels)


def test_a_system_that_does_not_describe_its_processor_has_an_unknown_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    assert hardware.__wrapped__().name == "unknown processor"


GRAVITON = {
    2: ("0xd0c", "fp asimd aes crc32 atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"),
    3: (
        "0xd40",
        "fp asimd aes crc32 atomics fphp asimdhp asimddp sha512 sve asimdfhm svei8mm svebf16 i8mm bf16",
    ),
}


def graviton(number: int) -> str:
    """The first processor in /proc/cpuinfo of a machine of ARM, which has no name there."""
    part, features = GRAVITON[number]
    return (
        f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
    )


def test_two_processors_of_arm_have_other_names_and_proofs_are_bound_to_their_extensions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    found = dict[str, str]()
    for number in GRAVITON:
        processor.CPUINFO.write_text(graviton(number))
        here = hardware.__wrapped__()
        monkeypatch.setattr(environment, "hardware", lambda here=here: here)
        found[here.name] = environment.environment("cpu")["device"]
    assert found == {
        "ARM processor 0x41 0xd0c": "cpu aarch64 ASIMDHP+ASIMDDP",
        "ARM processor 0x41 0xd40": "cpu aarch64 ASIMDHP+ASIMDDP+BF16+I8MM+SVE",
    }


@pytest.mark.slow
def test_no_other_file_of_the_product_asks_about_the_processor() -> None:
    nodes = nodes_with(*ASKING)
    asking = {
        file for file, node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith(ASKING)
    }
    assert asking == {ROOT / "models" / "machine" / "processor.py"}
