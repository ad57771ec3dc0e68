"""The names that format 1 had: files and keys are found under both, and no tensor's name is taken for a key."""

import pytest
from halfeven.models.store.manifest import in_present_words, name_in


@pytest.mark.slow
def test_a_file_is_found_under_the_name_that_the_version_has() -> None:
    for file in ("original.pt2", "original.onnx", "original.onnx.data"):
        older = file.replace("original", "whole")
        assert name_in([older], file) == older and name_in([file, older], file) == file
        assert name_in([], file) == file
    assert name_in(["half.onnx"], "half.onnx") == "half.onnx"


def test_keys_are_renamed_and_the_names_of_tensors_are_not() -> None:
    flips = [{"sample": 3, "whole": 1, "half": 2}]
    found = in_present_words({"accuracy_whole": 1.0, "outputs": {"whole": {"flips": flips}}})
    assert found == {
        "accuracy_original": 1.0,
        "outputs": {"whole": {"flips": [{"sample": 3, "original": 1, "half": 2}]}},
    }
