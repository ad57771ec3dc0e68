"""The selftest as the product has it; each check is a fact when it ends."""

from dataclasses import asdict

from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.serve.selftest.nets import NAMES, captured_net
from halfeven.serve.selftest.plain_way import FAILED
from halfeven.serve.selftest.selftest import CHECKS, run_checks

from tests.benchmarks.gpu.phase import Phase


def measure(phase: Phase) -> None:
    use_true_fp32()
    checked = [captured_net(name) for name in (NAMES[:1] if phase.tiny else NAMES)]
    for name, check in CHECKS.items():
        outcome = run_checks(phase.device, checked, lambda _: None, {name: check})[name]
        phase.facts.claim("check", outcome.status != FAILED, check=name, **asdict(outcome))
