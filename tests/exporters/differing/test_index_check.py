"""An index check finds vectors that lead a search elsewhere, and nothing where they are only rounded."""

import sys
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.differing.index_check import (
    BLOCK,
    ROWS,
    Nearest,
    _relevance,
    check_index,
    compare_nearest,
    index_file,
    least_recall,
    nearest,
)
from halfeven.models.errors import BadInput, BadSamples, BadSetting
from halfeven.models.store.store import Store
from torch import Tensor, nn

from tests.model_folders import LINEAR, samples_of, tensor, write_folder

WIDE, VECTORS, QUERIES = 64, 2000, 50
U = 2.0**-11


def inputs_of(seed: int, rows: int) -> Tensor:
    """Rows around forty centres, as texts are about some subjects."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, 32, generator=random)
    return centres[torch.randint(0, 40, (rows,), generator=random)] + 0.5 * torch.randn(
        rows, 32, generator=random
    )


def embedder(seed: int) -> nn.Sequential:
    """Ten kinds of nets, by seed: other activations, depths and norms."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        activation = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Softplus)[seed % 5]
        layers: list[nn.Module] = [nn.Linear(32, 48 + 16 * seed), activation(), nn.LayerNorm(48 + 16 * seed)]
        if seed >= 5:
            layers += [nn.Linear(48 + 16 * seed, 48 + 16 * seed), activation()]
        return nn.Sequential(*layers, nn.Linear(48 + 16 * seed, WIDE)).eval().requires_grad_(False)


def vectors_of(net: nn.Module, inputs: Tensor) -> np.ndarray:
    """The vectors that a net computes in the type of its weights."""
    return net(inputs.to(next(net.parameters()).dtype)).float().numpy()


def recall_of(net: nn.Module, half: nn.Module, metric: str = "cosine") -> float:
    index, queries = vectors_of(net, inputs_of(1, VECTORS)), inputs_of(2, QUERIES)
    found = [nearest(vectors_of(one, queries), index, 10, metric) for one in (net, half)]
    return compare_nearest(found[0], found[1], len(index), U).recall


def last_weight(half: nn.Sequential) -> Tensor:
    return [*half.parameters()][-2]


def block_scaled(half: nn.Sequential) -> None:
    last_weight(half)[: WIDE // 4] *= 0.3


def block_permuted(half: nn.Sequential) -> None:
    last_weight(half)[8:24] = last_weight(half)[8:24].flip(0)


def saturated(half: nn.Sequential) -> None:
    """The norm of the vectors is cut off."""
    half.append(nn.Hardtanh(-0.1, 0.1))


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_half_finds_the_same_vectors(seed: int) -> None:
    assert recall_of(embedder(seed), embedder(seed).half()) >= 0.99


@pytest.mark.parametrize("degrade", [block_scaled, block_permuted, saturated])
@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_a_degraded_half_is_found(degrade: Callable[[nn.Sequential], None], metric: str) -> None:
    half = embedder(1).half()
    degrade(half)
    assert recall_of(embedder(1), half, metric) < 0.95


@pytest.mark.slow
def test_the_nearest_of_a_large_index_are_those_of_one_comparison() -> None:
    """The scores of whole numbers are exact, and many are equal."""
    index = np.random.randint(-4, 5, (BLOCK + 30, 4)).astype(np.float32)
    queries = np.random.randint(-4, 5, (ROWS + 2, 4)).astype(np.float32)
    scores = queries.astype(np.float64) @ index.astype(np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")
    for k in (7, 40):
        found = nearest(queries, index, k, "dot")
        np.testing.assert_array_equal(found.places, order[:, :k])
        np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, found.places, 1))


@pytest.mark.slow
def test_many_queries_take_no_more_memory_than_a_block_of_them() -> None:
    index, queries = (np.random.normal(size=(rows, 2)).astype(np.float32) for rows in (BLOCK, 6 * ROWS))
    tracemalloc.start()
    try:
        nearest(queries, index, 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The scores of a block, and the copies of them from which the largest are taken.
    assert peak < 5 * 8 * BLOCK * ROWS


def test_near_duplicates_that_fp32_does_not_tell_apart_may_change_places() -> None:
    fp32 = Nearest(np.array([[0, 1, 2]]), np.array([[1.0, 0.9999999, 0.5]]))
    swapped = Nearest(np.array([[1, 0, 2]]), fp32.scores)
    assert compare_nearest(fp32, swapped, 3, U).swapped == 0
    far = Nearest(np.array([[0, 2, 1]]), fp32.scores)
    verdict = compare_nearest(fp32, far, 3, U)
    assert (verdict.pairs, verdict.swapped, verdict.recall) == (1, 1, 1.0)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_half_vector_that_is_not_finite_finds_nothing(metric: str, wrong: float) -> None:
    index, queries = np.random.normal(size=(60, 4)), np.random.normal(size=(3, 4))
    odd = queries.copy()
    odd[1, 2] = wrong
    fp32, half = (nearest(one, index, 50, metric) for one in (queries, odd))
    verdict = compare_nearest(fp32, half, 60, U, {1: {int(fp32.places[1, 0]): 1.0}})
    assert (verdict.recall, verdict.worst_query) == (pytest.approx(2 / 3), 1)
    assert verdict.ndcg == (1.0, 0.0)


def test_ndcg_is_one_for_the_ideal_order_and_less_for_another() -> None:
    scores = np.array([[3.0, 2.0, 1.0]])
    fp32, half = Nearest(np.array([[0, 1, 2]]), scores), Nearest(np.array([[2, 1, 0]]), scores)
    verdict = compare_nearest(fp32, half, 3, U, {0: {0: 3.0, 1: 2.0, 2: 1.0}})
    assert (
        verdict.ndcg is not None
        and verdict.ndcg[0] == 1.0
        and verdict.ndcg[1] == pytest.approx(0.79, abs=0.01)
    )


def test_an_index_may_be_the_lists_of_a_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    index = np.random.normal(size=(30, 4)).astype(np.float32)
    number = pyarrow.float32()
    for kind in (pyarrow.list_(number), pyarrow.large_list(number), pyarrow.list_(number, 4)):
        vectors = pyarrow.array(index.tolist(), type=kind)
        table = pyarrow.table({"name": [str(row) for row in range(30)], "vector": vectors})
        parquet.write_table(table, tmp_path / "index.parquet", row_group_size=7)
        np.testing.assert_array_equal(index_file(tmp_path / "index.parquet"), index)
    parquet.write_table(table, tmp_path / "index.parquet", compression="none", use_dictionary=False)
    place = parquet.read_metadata(tmp_path / "index.parquet").row_group(0).column(0).data_page_offset
    with (tmp_path / "index.parquet").open("r+b") as file:  # whoever reads the names too cannot
        file.seek(place)
        file.write(b"\xff" * 16)
    np.testing.assert_array_equal(index_file(tmp_path / "index.parquet"), index)
    parquet.write_table(table.select(["name"]), tmp_path / "names.parquet")
    parquet.write_table(
        pyarrow.table({"vector": [[1.0], [1.0, 2.0, 3.0], None, [1.0, 2.0]]}), tmp_path / "odd.parquet"
    )
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for name in ("names", "odd", "broken"):
        with pytest.raises(BadSamples, match=rf"{name}\.parquet is not a \.parquet file of vectors"):
            index_file(tmp_path / f"{name}.parquet")


def test_parquet_without_its_reader_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadSetting, match=r"index\.parquet: Parquet is read by pyarrow.*halfeven\[finetune\]"):
        index_file(tmp_path / "index.parquet")


def test_a_file_of_another_kind_is_named_without_the_advice_to_load_it_unsafely(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07net of a kind")
    with pytest.raises(BadSamples, match=r"it begins with .* expected what numpy\.save writes$"):
        index_file(tmp_path / "net.onnx")


@pytest.mark.filterwarnings("ignore")  # numpy's, of the same damage
@pytest.mark.parametrize(
    "damage", [{"shape": (2**70, 4)}, {"shape": (2**62, 4)}, {"shape": (-1, 4)}, "{" + "(" * 300]
)
def test_a_damaged_header_is_refused(tmp_path: Path, damage: str | dict[str, tuple[int, ...]]) -> None:
    words = str({"descr": "<f4", "fortran_order": False} | damage) if isinstance(damage, dict) else damage
    header = words.encode().ljust(501) + b"\n"
    (tmp_path / "i.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64
    )
    with pytest.raises(BadSamples, match=r"i\.npy is not a \.npy file of vectors"):
        index_file(tmp_path / "i.npy")


def test_judgements_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for worth, wrong in (([1.0, 0.0], True), ([1.0, 1.0], False)):
        np.savez(tmp_path / "judged.npz", query=[0, 0], vector=[3, 3], relevance=worth)
        with (
            pytest.raises(BadSamples, match="query 0 has two relevances for vector 3")
            if wrong
            else nullcontext()
        ):
            assert _relevance(tmp_path / "judged.npz", 1, 9) == {0: {3: 1.0}}


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
    with pytest.raises(BadSamples, match="has 10 vectors, and the 10 nearest of them are all"):
        check_index(version, np.random.normal(size=(10, 3)), tmp_path / "x.npz")
    numbers = np.random.normal(size=(40, 3)).astype(np.float32)
    for k, least, fits in ((20, 0.9, False), (20, 1.0, True), (20, 0.0, True), (10, 0.4, False)):
        with (
            nullcontext()
            if fits
            else pytest.raises(BadSamples, match=f"a random vector finds {k / 40:g} of the {k}")
        ):
            check_index(version, numbers, tmp_path / "x.npz", k=k, least=least)
    for row, wrong in ((7, np.nan), (0, np.inf)):
        index = numbers.copy()
        index[row, 1] = wrong
        with pytest.raises(BadSamples, match=f"vector {row} of the index is not finite"):
            check_index(version, index, tmp_path / "x.npz")
    for index in (np.zeros((40, 3)), np.ones((40, 3))):
        with pytest.raises(BadSamples, match="nothing is compared"):
            check_index(version, index, tmp_path / "x.npz")
    for worth in (0.0, np.nan, -1.0):
        np.savez(tmp_path / "j.npz", query=np.array([1]), vector=np.array([2]), relevance=np.array([worth]))
        with pytest.raises(BadSamples, match="relevance: expected numbers from 0 on"):
            check_index(version, numbers, tmp_path / "x.npz", judgements=tmp_path / "j.npz")
    np.savez(tmp_path / "j.npz", query=np.array([30]), vector=np.array([2]), relevance=np.array([1.0]))
    with pytest.raises(BadSamples, match="query: expected whole numbers from 0 to 29"):
        check_index(version, numbers, tmp_path / "x.npz", judgements=tmp_path / "j.npz")
    with pytest.raises(BadSetting, match="--min-recall nan"):
        least_recall(version, float("nan"))
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
    for shape in ((), (5,), (5, 3, 1)):
        np.save(tmp_path / "odd.npy", np.zeros(shape))
        with pytest.raises(BadSamples, match="expected one array of floating vectors"):
            index_file(tmp_path / "odd.npy")
    (tmp_path / "no.npy").write_bytes(b"nothing")
    with pytest.raises(BadSamples, match=r"no\.npy is not a \.npy file"):
        index_file(tmp_path / "no.npy")
