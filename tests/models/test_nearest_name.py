"""An unknown name is answered with the known one that was probably meant."""

import pytest
from halfeven.models.nearest_name import nearest_name
from halfeven.serve.finetune.jobs.choices.hyperparameters import KNOWN


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
