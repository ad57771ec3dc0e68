"""Generated samples of an input that is a picture are pixels, as bright as those that the model knows."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from halfeven.exporters.inputs.synthetic import generate
from halfeven.exporters.proof.drawn_pictures import CLEARLY, TIMES, Shown, with_pixels
from halfeven.exporters.proof.planted_faults import measured_power
from halfeven.exporters.proof.power import FINE, Power
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.folder.package import Precision
from torch import Tensor, nn

from tests.programs import original


class Reader(nn.Module):
    """A net as if trained on pixels up to ``brightest``: its first norm has their mean and spread."""

    def __init__(self, brightest: float, last: bool, convolves: bool = True) -> None:
        super().__init__()
        self.last, colours = last, 3
        self.norm = nn.BatchNorm2d(colours)
        self.norm.running_mean = torch.full((colours,), brightest / 2)
        self.norm.running_var = torch.full((colours,), (brightest / 4) ** 2)
        self.conv = nn.Conv2d(3, 8, 3, padding=1) if convolves else nn.Identity()
        self.head = nn.Linear(8 if convolves else 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2) if self.last else x
        seen = torch.relu(self.conv(torch.tanh(self.norm(x))))
        return torch.softmax(self.head(seen.amax((2, 3))), -1)


def subject_of(module: nn.Module, *row: int) -> Subject:
    made = original(module, {"x": torch.randn(8, *row)})
    return Subject(made.program, made.spec, generate(made.spec), Precision("O1"), ("torch",), Path(), {})


def drawn(subject: Subject) -> Subject:
    maker = ProgramForms(subject)
    return with_pixels(subject, maker.original_graph(), maker.row_operations)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("brightest", [1.0, 255.0])
def test_pixels_are_as_bright_as_what_the_model_was_trained_on(brightest: float, last: bool) -> None:
    row = (20, 48, 3) if last else (3, 20, 48)
    subject = drawn(subject_of(Reader(brightest, last), *row))
    array = subject.samples.arrays["x"]
    assert (
        array.shape == (32, *row)
        and 0 <= array.min() < 0.1 * brightest < 0.9 * brightest < array.max() <= brightest
    )
    assert any(f"pixels from 0 to {brightest:g}" in note for note in subject.notes)


@pytest.mark.slow
def test_what_is_no_picture_and_what_was_given_stays() -> None:
    for module, row in (
        (Reader(1.0, False, convolves=False), (3, 20, 48)),
        (nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU()), (3, 64)),
        (nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), (8, 20, 20)),
    ):
        subject = subject_of(Named(module), *row)
        assert drawn(subject) is subject
    subject = subject_of(Reader(1.0, False), 3, 20, 48)
    given = replace(subject, samples=replace(subject.samples, source="given"))
    assert drawn(given) is given and drawn(subject) is not subject
    drifted = replace(subject, samples=replace(subject.samples, drifted=2))
    before, after = (one.samples.arrays["x"] for one in (drifted, drawn(drifted)))
    assert (before == after).all(axis=(1, 2, 3)).tolist() == [True] * 2 + [False] * 30


class Measured(Shown):
    """Counts how often the share of noticed faults is asked for."""

    def __init__(self, noticed: float, variation: float) -> None:
        super().__init__(cast(Any, None), cast(Any, None), "fp16", variation)
        self.share, self.asked = noticed, 0

    @property
    def noticed(self) -> float:  # type: ignore[override]
        self.asked += 1
        return self.share


def test_faults_are_planted_only_where_they_decide_which_pixels_are_taken() -> None:
    shares, variations = (0.0, 0.1, 0.5, 0.7, 0.8, 0.85, 1.0), (0.0, 0.1, 0.2, 0.5, 1.0)
    for most, widest, noticed, variation in product(shares, variations, shares, variations):
        best, found = Measured(most, widest), Measured(noticed, variation)
        if noticed >= most + CLEARLY:
            more = TIMES * variation >= widest
        else:
            more = noticed > most - CLEARLY and variation > TIMES * widest
        assert found.is_more_than(best) == more, (most, widest, noticed, variation)
        if TIMES * variation < widest:
            assert best.asked == found.asked == 0
        elif variation > TIMES * widest and noticed > 0.8:
            assert best.asked == 0
        elif variation <= TIMES * widest and most > 0.8:
            assert found.asked == 0


@pytest.mark.slow
@pytest.mark.parametrize("brightest", [1.0, 255.0])
def test_the_share_of_fine_faults_is_the_same_without_large_ones(brightest: float) -> None:
    maker = ProgramForms(drawn(subject_of(Reader(brightest, False), 3, 20, 48)))
    run, graph = maker.reference_run(maker.subject.samples.split()[1]), maker.original_graph()

    def seen_in(power: Power) -> tuple[float, bool, list[tuple[str, frozenset[str]]]]:
        return power.noticed(FINE), power.is_shown, [(one.why, one.outputs) for one in power.planted]

    fine = measured_power(run, graph, "fp16", fine_alone=True)
    assert seen_in(fine) == seen_in(measured_power(run, graph, "fp16"))
    assert all(one.noticed == {FINE} for one in fine.planted if FINE in one.noticed)


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
