"""An unknown name is answered with the known one that was probably meant."""

import difflib
from random import Random

import pytest
from halfeven.models.nearest_name import nearest_name
from halfeven.serve.finetune.jobs.choices.hyperparameters import KNOWN

from tests.conftest import SEED


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "learning_rate"),
        ("wd", "weight_decay"),
        ("learning_rat", "learning_rate"),
        ("epochs", "n_epochs"),
    ],
)
def test_initials_and_misspelt_names_of_a_job_s_settings_are_understood(given: str, meant: str) -> None:
    assert nearest_name(given, KNOWN) == meant


def test_of_many_names_none_is_nearer_than_the_one_that_is_said() -> None:
    random = Random(SEED)
    words = ["".join(random.choices("abc-", k=random.randint(1, 9))) for _ in range(200)]
    for name in random.sample(words, 20):
        others = [word for word in words if word != name]

        def similarity(one: str, name: str = name) -> float:
            return difflib.SequenceMatcher(None, one, name).ratio()

        assert similarity(nearest_name(name, others)) == max(map(similarity, others))
