"""Bad input over a real wire: refused with words, the server lives, and the next caller is answered right.

What a request itself can say wrongly is in tests/serve/test_bad_requests.py; here is what only the whole server can get
wrong.
"""

import json

import pytest

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving, answers_right

GOOD = {"inputs": [COUNTING, ONES]}


@pytest.mark.slow(seconds=28)
def test_a_bystander_is_answered_right_between_bad_requests(serving: Serving) -> None:
    bad_bodies = (
        json.dumps(GOOD)[:-3],
        '{"inputs":' + "[" * 250_000 + "]" * 250_000 + "}",
        json.dumps({"inputs": [{**COUNTING, "shape": [2**32, 2**32]}, ONES]}),
        json.dumps({**GOOD, "outputs": [{"name": "OUTPUT0"}] * 40_000}),
    )
    with serving.client() as bad, serving.client() as good:
        for body in bad_bodies:
            assert bad.post(SIMPLE, content=body).status_code == 400
            answers_right(good)
        for name in ("..%2f..%2f..%2fetc%2fpasswd", "simple%00", "simple/versions/..%2f1"):
            refused = bad.get(f"/v2/models/{name}/config")
            assert refused.status_code in (400, 404)
            assert not any(words in refused.text for words in ("/tmp", "halfeven-store", "Traceback"))
