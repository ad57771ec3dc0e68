"""An index check finds vectors that lead a search elsewhere, and nothing where they are only rounded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.convert import Options, convert
from halfeven.exporters.differing.index_check import (
    BLOCK,
    Nearest,
    check_index,
    compare_nearest,
    index_file,
    nearest,
)
from halfeven.models.errors import BadInput, BadSamples
from halfeven.models.store import Store

from tests.model_folders import LINEAR, samples_of, tensor, write_folder

WIDE, VECTORS, QUERIES = 64, 2000, 50
U = 2.0**-11


def embedded(seed: int, rows: int) -> np.ndarray:
    """Vectors around forty centres, as embedders give them."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(40, WIDE))
    return (centres[random.integers(0, 40, rows)] + 0.5 * random.normal(size=(rows, WIDE))).astype(np.float32)


def recall_of(index: np.ndarray, queries: np.ndarray, half: np.ndarray, metric: str = "cosine") -> float:
    found = [nearest(one, index, 10, metric) for one in (queries, half)]
    return compare_nearest(found[0], found[1], len(index), U).recall


def block_scaled(vectors: np.ndarray) -> np.ndarray:
    return vectors * np.where(np.arange(WIDE) < WIDE // 4, np.float32(0.3), np.float32(1))


def block_permuted(vectors: np.ndarray) -> np.ndarray:
    places = np.arange(WIDE)
    places[8:24] = places[8:24][::-1]
    return vectors[:, places]


def saturated(vectors: np.ndarray) -> np.ndarray:
    return np.clip(vectors, -0.7, 0.7)


@pytest.mark.parametrize("seed", range(10))
def test_rounded_vectors_find_the_same_vectors(seed: int) -> None:
    index, queries = embedded(seed, VECTORS), embedded(seed + 100, QUERIES)
    assert recall_of(index, queries, queries.astype(np.float16).astype(np.float32)) >= 0.99


@pytest.mark.parametrize("degraded", [block_scaled, block_permuted, saturated])
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_degraded_vectors_are_found(degraded: Callable[[np.ndarray], np.ndarray], metric: str) -> None:
    index, queries = embedded(1, VECTORS), embedded(2, QUERIES)
    assert recall_of(index, queries, degraded(queries), metric) < 0.95


def test_the_nearest_of_a_large_index_are_those_of_one_comparison() -> None:
    index = np.random.normal(size=(BLOCK + 3000, 4)).astype(np.float32)
    queries = np.random.normal(size=(3, 4)).astype(np.float32)
    found = nearest(queries, index, 7, "dot")
    scores = queries.astype(np.float64) @ index.astype(np.float64).T
    np.testing.assert_array_equal(found.places, np.argsort(-scores, axis=1, kind="stable")[:, :7])


def test_near_duplicates_that_fp32_does_not_tell_apart_may_change_places() -> None:
    fp32 = Nearest(np.array([[0, 1, 2]]), np.array([[1.0, 0.9999999, 0.5]]))
    swapped = Nearest(np.array([[1, 0, 2]]), fp32.scores)
    assert compare_nearest(fp32, swapped, 3, U).swapped == 0
    far = Nearest(np.array([[0, 2, 1]]), fp32.scores)
    verdict = compare_nearest(fp32, far, 3, U)
    assert (verdict.pairs, verdict.swapped, verdict.recall) == (1, 1, 1.0)


def test_ndcg_is_one_for_the_ideal_order_and_less_for_another() -> None:
    scores = np.array([[3.0, 2.0, 1.0]])
    fp32, half = Nearest(np.array([[0, 1, 2]]), scores), Nearest(np.array([[2, 1, 0]]), scores)
    verdict = compare_nearest(fp32, half, 3, U, {0: {0: 3.0, 1: 2.0, 2: 1.0}})
    assert (
        verdict.ndcg is not None
        and verdict.ndcg[0] == 1.0
        and verdict.ndcg[1] == pytest.approx(0.79, abs=0.01)
    )


@pytest.mark.slow  # a conversion
def test_a_version_is_asked_in_each_form_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    samples = samples_of({"x": [4]}, 24, seed=1)
    folder = write_folder(
        tmp_path / "net", LINEAR, samples=samples, outputs=[tensor("y", "FP32", [-1, 3], kind="embedding")]
    )
    version = convert(folder, Store(tmp_path / "store"), Options(forms=("torch",))).version
    np.savez(tmp_path / "x.npz", x=np.random.normal(size=(30, 4)).astype(np.float32))
    np.save(tmp_path / "index.npy", np.random.normal(size=(500, 3)).astype(np.float32))
    forms = check_index(version, index_file(tmp_path / "index.npy"), tmp_path / "x.npz")
    assert forms["torch"]["queries"] == 30 and forms["torch"]["recall"] > 0.95
    with pytest.raises(BadSamples, match=r"expected \[vectors, 3\]"):
        check_index(version, np.zeros((5, 4), np.float32), tmp_path / "x.npz")
    with pytest.raises(BadInput, match="--output z: expected the output"):
        check_index(version, np.zeros((5, 3), np.float32), tmp_path / "x.npz", output="z")
    refused = {
        **version.manifest,
        "forms": {"torch": {**version.manifest["forms"]["torch"], "passed": False}},
    }
    with pytest.raises(BadInput, match="no proven half"):
        check_index(replace(version, manifest=refused), np.zeros((5, 3), np.float32), tmp_path / "x.npz")
    two = np.zeros((2, 2))
    np.savez(tmp_path / "two.npz", query=two, vector=two, relevance=two)
    with pytest.raises(BadSamples, match="all of one length"):
        check_index(version, np.zeros((5, 3)), tmp_path / "x.npz", judgements=tmp_path / "two.npz")
    (tmp_path / "no.npy").write_bytes(b"nothing")
    with pytest.raises(BadSamples, match=r"no\.npy is not a \.npy file"):
        index_file(tmp_path / "no.npy")
