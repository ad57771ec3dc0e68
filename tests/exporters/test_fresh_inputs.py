"""A proven half errs on inputs that nobody saw no oftener than its headline says.

One of these models in a run; `python -m tests.benchmarks.fresh_inputs` asks all of the corpus.
"""

import pytest

from tests.benchmarks.fresh_inputs import rows_of
from tests.slow import one_in_turn

ASKED = (
    "tiny product",
    "hashed ids",
    "argmax",
    "residual",
    "cosine head",
    "zoo mlp",
    "zoo recommender",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in_turn(ASKED, 0))
def test_256_fresh_inputs_err_no_oftener_than_the_headline_says(name: str) -> None:
    rows = list(rows_of("program", name))
    assert rows and [row for row in rows if not row.holds] == []
