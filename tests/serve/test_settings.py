"""Variables that are no settings are named: what was meant is not done."""

import pytest
from halfeven.serve.settings import Settings, unknown_variables


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("HALFEVEN_IDEL_SECONDS", "HALFEVEN_IDLE_SECONDS"),
        ("HALFEVEN_LOGFORMAT", "HALFEVEN_LOG_FORMAT"),
        ("HALFEVEN_KEYFILE", "HALFEVEN_KEY_FILE"),
        ("halfeven_prot", "HALFEVEN_PORT"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest_setting(sent: str, meant: str) -> None:
    (sentence,) = unknown_variables({sent: "1", "PATH": "x"})
    assert sent in sentence and sentence.endswith(meant)


def test_settings_and_what_the_tests_use_are_not_named() -> None:
    known = {f"HALFEVEN_{name.upper()}": "" for name in Settings.model_fields}
    assert (
        unknown_variables({**known, "HALFEVEN_API_KEY": "x", "HALFEVEN_TEST_SEED": "1", "halfeven_port": "1"})
        == []
    )
