"""Search an index of FP32 vectors with the query vectors of a half, and compare the result with FP32's.

For each query the k nearest vectors of the index are found by FP32's query vector and by the half's. Reported are the
share that both find (recall), the pairs of nearest vectors that change places although FP32 tells them apart, and, with
judgements, the loss of nDCG.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...models.engines.load import load_half, load_original
from ...models.errors import BadInput, BadSamples, BadSetting
from ...models.files.json_fields import JsonFields
from ...models.spec.spec import UNIT_ROUNDOFF, ModelSpec
from ...models.store.store import Version
from ..guessing.given_samples import judging_samples
from ..inputs.samples import Samples, read_tensors
from ..proof.maker import Notify
from ..proof.prove import answers_of
from ..proof.subject import CPU

BLOCK = 1 << 16  # vectors of the index that are compared at a time
ROWS = 64  # that are compared with them at a time
APART_U = 4.0  # u of the scores' spread, as rule 5 of the gate has it
_LEAST_RECALL = 0.99  # where neither the command nor the model says another
METRICS = ("cosine", "dot")
Relevance = Mapping[int, Mapping[int, float]]  # query → vector → how relevant


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest vectors of each query and their scores, the best first."""

    places: np.ndarray  # [queries, k] INT64
    scores: np.ndarray  # [queries, k] FP64


@dataclass(frozen=True, slots=True)
class IndexVerdict(JsonFields):
    """``recall``: the mean over the queries, ``worst_recall``: of the worst query. ``swapped`` of ``pairs``: the
    nearest vectors in FP32's order, further apart than 4u of the spread, that the half has the other way round.
    ``ndcg``: FP32's and the half's; None without judgements."""

    queries: int
    vectors: int
    k: int
    recall: float
    worst_recall: float
    worst_query: int
    pairs: int
    swapped: int
    ndcg: tuple[float, float] | None = None


def least_recall(version: Version, asked: float | None) -> float:
    """The share of the nearest vectors that the half must find: what the command asks, or the model's own limit. Raises
    BadSetting."""
    if asked is not None and not 0 <= asked <= 1:
        raise BadSetting(f"--min-recall {asked:g}: expected a share from 0 to 1")
    limits = (asked, version.spec().parity.min_recall, _LEAST_RECALL)
    return next(limit for limit in limits if limit is not None)


# A query that is not finite has scores that are NaN, which `compare_nearest` counts.
@np.errstate(invalid="ignore")
def nearest(queries: np.ndarray, index: np.ndarray, k: int, metric: str = "cosine") -> Nearest:
    """``queries`` [queries, d], ``index`` [vectors, d], both floating; equal scores keep the order of the index."""
    queries = _unit(queries) if metric == "cosine" else queries.astype(np.float64)
    kept = min(k, len(index))
    best, places = np.full((len(queries), kept), -np.inf), np.zeros((len(queries), kept), np.int64)
    for start in range(0, len(index), BLOCK):
        block = np.asarray(index[start : start + BLOCK])
        block = _unit(block) if metric == "cosine" else block.astype(np.float64)
        for first in range(0, len(queries), ROWS):
            rows = slice(first, first + ROWS)
            scores = queries[rows] @ block.T
            found = _largest(scores, kept)
            # At first there are none, and what stands there for them may not come before a score of -inf.
            joined = np.concatenate([best[rows, : min(start, kept)], np.take_along_axis(scores, found, 1)], 1)
            at = np.concatenate([places[rows, : min(start, kept)], start + found], 1)
            order = np.argsort(-joined, axis=1, kind="stable")[:, :kept]
            best[rows, : order.shape[1]] = np.take_along_axis(joined, order, 1)
            places[rows, : order.shape[1]] = np.take_along_axis(at, order, 1)
    return Nearest(places, best)


def _largest(scores: np.ndarray, k: int) -> np.ndarray:
    """The places of the ``k`` largest scores of each row, or of all where there are no more, in order of the places. Of
    equal ones the first count. NaN counts as the least."""
    width = scores.shape[1]
    if width <= k:
        return np.broadcast_to(np.arange(width), scores.shape)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    least = np.partition(scores, width - k, axis=1)[:, width - k, None]
    above, equal = scores > least, scores == least
    room = k - above.sum(axis=1, keepdims=True)
    taken = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= room))
    return np.nonzero(taken)[1].reshape(-1, k)


def compare_nearest(
    fp32: Nearest, half: Nearest, vectors: int, u: float, relevance: Relevance | None = None
) -> IndexVerdict:
    """``u``: the half's unit roundoff. A query finds nothing where a score of the half is not a finite number."""
    scored = np.isfinite(half.scores).all(axis=1, keepdims=True)
    half = Nearest(np.where(scored, half.places, -1), half.scores)
    shares = [
        len(set(a) & set(b)) / max(len(a), 1)
        for a, b in zip(fp32.places.tolist(), half.places.tolist(), strict=True)
    ]
    pairs, swapped = np.array(list(_swaps(fp32, half, u))).reshape(-1, 2).sum(0).tolist()
    ndcg = None
    if relevance is not None:
        ndcg = (_ndcg(fp32.places, relevance), _ndcg(half.places, relevance))
    worst = int(np.argmin(shares))
    k = fp32.places.shape[1]
    return IndexVerdict(
        len(shares), vectors, k, float(np.mean(shares)), shares[worst], worst, int(pairs), int(swapped), ndcg
    )


def check_index(
    version: Version,
    index: np.ndarray,
    queries: Path,
    *,
    k: int = 10,
    least: float = _LEAST_RECALL,
    metric: str = "cosine",
    output: str | None = None,
    judgements: Path | None = None,
    notify: Notify = lambda _: None,
) -> dict[str, Any]:
    """The verdict on each proven form of a version, by form. ``queries``: inputs of the model, a row for each query;
    ``least``: the recall that is asked; ``output``: the one that is the vector, by default the only one of kind
    embedding, or the only one.

    Raises BadInput where there is no half or no such output, BadSamples for an index or judgements that do not fit.
    """
    spec, precision = version.spec(), version.manifest["half"]
    name = _output(spec, output)
    if precision is None:
        raise BadInput(f"{version} has no half whose vectors could be compared: {version.manifest['reason']}")
    rows = judging_samples(version, queries)
    relevance = _relevance(judgements, rows.count, len(index)) if judgements else None
    _check_finite(index, "vector {} of the index")
    found = dict[str, Any]()
    for form, facts in version.manifest["forms"].items():
        if not facts["passed"] or not facts.get("half_nodes", 1):
            continue
        notify(f"asking the {form} form of {version} for {rows.count} queries")
        ours, theirs = load_original(version, form, CPU), load_half(version, form, CPU)
        try:
            vectors = [_vectors(spec, answers_of(spec, one), rows, name) for one in (ours, theirs)]
        finally:
            ours.close()
            theirs.close()
        _check_sizes(index, vectors[0].shape[1], k, least)
        _check_finite(vectors[0], f"FP32's vector of query {{}} of {queries.name}")
        fp32, half = (nearest(one, index, k, metric) for one in vectors)
        verdict = compare_nearest(fp32, half, len(index), UNIT_ROUNDOFF[precision], relevance)
        if not verdict.pairs:
            raise BadSamples(
                f"FP32 tells none of the {k} nearest vectors of any query apart, so nothing is compared: expected an "
                "index and queries whose vectors differ"
            )
        found[form] = verdict.to_json()
    if not found:
        raise BadInput(f"{version} has no proven half whose vectors could be compared")
    return found


def _check_sizes(index: np.ndarray, width: int, k: int, least: float) -> None:
    """Raises BadSamples for an index of other vectors than those of the model, or of so few that a random vector finds
    more than half of what is asked."""
    if index.ndim != 2 or index.shape[1] != width or not len(index):
        raise BadSamples(f"the index has the shape {list(index.shape)}: expected [vectors, {width}]")
    if len(index) <= k:
        raise BadSamples(
            f"the index has {len(index)} vectors, and the {k} nearest of them are all: give a smaller -k"
        )
    if least and k / len(index) > least / 2:
        raise BadSamples(
            f"the index has {len(index)} vectors, and a random vector finds {k / len(index):.2g} of the {k} nearest: "
            f"expected at most half of the recall that is asked, {least:g}; give a smaller -k, or more vectors"
        )


def _check_finite(vectors: np.ndarray, what: str) -> None:
    """Raises BadSamples for a vector with NaN or infinity, or whose length leaves FP64. ``what`` names it by its
    row."""
    for start in range(0, len(vectors), BLOCK):
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.square(vectors[start : start + BLOCK], dtype=np.float64).sum(-1)
        if len(wrong := np.flatnonzero(~np.isfinite(sums))):
            raise BadSamples(
                f"{what.format(start + wrong[0])} is not finite: expected numbers that can be compared"
            )


def index_file(path: Path) -> np.ndarray:
    """The vectors of a .npy file, which stay in the file until they are compared, or of the one column of lists of a
    Parquet file. Raises BadSamples, BadSetting for Parquet without pyarrow."""
    try:
        found = _column(path) if path.suffix == ".parquet" else _mapped(path)
    except BadSetting:
        raise
    except Exception as error:  # numpy and pyarrow raise many kinds on such bytes
        raise BadSamples(f"{path} is not a {path.suffix or '.npy'} file of vectors: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.ndim != 2:
        raise BadSamples(f"{path}: expected one array of floating vectors, [vectors, d]")
    return found


def _mapped(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        if (start := file.read(6)) != b"\x93NUMPY":
            raise ValueError(f"it begins with {start!r}, expected what numpy.save writes")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _column(path: Path) -> np.ndarray:
    """Reads no other column. Raises BadSetting without pyarrow, which the extra ``finetune`` brings."""
    try:
        from pyarrow import compute, parquet, types
    except ImportError as error:
        raise BadSetting(
            f"--index {path}: Parquet is read by pyarrow, which cannot be imported here ({error}): give a .npy file, "
            "or pip install 'halfeven[finetune]'"
        ) from error
    file = parquet.ParquetDataset(path)
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    names = [field.name for field in file.schema if any(is_one(field.type) for is_one in kinds)]
    if len(names) != 1:
        raise ValueError(f"expected one column of lists, got {len(names)} among {file.schema.names}")
    vectors = file.read(columns=names).column(names[0])
    lengths = compute.call_function("list_value_length", [vectors]).unique().to_pylist()
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(f"expected lists of one length, got {sorted(map(str, lengths))[:9]}")
    return vectors.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, lengths[0])


def _output(spec: ModelSpec, asked: str | None) -> str:
    embeddings = [tensor.name for tensor in spec.outputs if tensor.kind == "embedding"]
    names = embeddings if len(embeddings) == 1 else [tensor.name for tensor in spec.outputs]
    if asked is None and len(names) == 1:
        return names[0]
    if asked not in [tensor.name for tensor in spec.outputs]:
        raise BadInput(f"--output {asked}: expected the output that is the vector, one of {names}")
    return asked


def _vectors(spec: ModelSpec, answers: Any, rows: Samples, output: str) -> np.ndarray:
    found = [answers(inputs)[output] for _, inputs in rows.batches(min(spec.max_batch_size, 32))]
    joined = np.concatenate(found) if spec.batched else np.stack(found)
    joined = joined[: rows.count]
    if joined.ndim != 2:
        raise BadInput(
            f"output '{output}' has the shape {list(joined.shape)}: a vector for each query is expected"
        )
    return joined


def _unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def _swaps(fp32: Nearest, half: Nearest, u: float) -> Iterator[tuple[int, int]]:
    """Yields for each query the number of pairs of nearest vectors that FP32 tells apart, and how many of them swap."""
    for places, scores, theirs in zip(fp32.places, fp32.scores, half.places, strict=True):
        rank = {int(place): at for at, place in enumerate(theirs)}
        apart = -np.diff(scores) > APART_U * u * max(float(scores[0] - scores[-1]), 0.0)
        known = [
            (rank.get(int(first), len(theirs)), rank.get(int(second), len(theirs)))
            for first, second, distinct in zip(places, places[1:], apart, strict=False)
            if distinct
        ]
        yield len(known), sum(first > second for first, second in known)


def _ndcg(places: np.ndarray, relevance: Relevance) -> float:
    gains = list[float]()
    discount = 1 / np.log2(np.arange(places.shape[1]) + 2)
    for query, found in enumerate(places.tolist()):
        known = relevance.get(query, {})
        ideal = sorted(known.values(), reverse=True)[: len(found)]
        if sum(ideal):
            reached = sum(known.get(place, 0.0) * discount[at] for at, place in enumerate(found))
            gains.append(float(reached / sum(value * discount[at] for at, value in enumerate(ideal))))
    return float(np.mean(gains)) if gains else 1.0


def _relevance(path: Path, queries: int, vectors: int) -> Relevance:
    """A file with three arrays of one length: ``query``, ``vector`` (places in the index) and ``relevance``. Raises
    BadSamples."""
    found = read_tensors(path)
    wanted = {"query", "vector", "relevance"}
    if not wanted <= found.keys() or {found[name].shape for name in wanted} != {(found["query"].size,)}:
        raise BadSamples(f"{path.name}: expected the arrays query, vector and relevance, all of one length")
    query, vector, value = (found[name] for name in ("query", "vector", "relevance"))
    for name, places, most in (("query", query, queries), ("vector", vector, vectors)):
        if places.dtype.kind not in "iu" or ((places < 0) | (places >= most)).any():
            raise BadSamples(
                f"{path.name}: {name}: expected whole numbers from 0 to {most - 1}, its place among them"
            )
    if (
        value.dtype.kind not in "iuf"
        or not (np.isfinite(value) & (value >= 0)).all()
        or not (value > 0).any()
    ):
        raise BadSamples(f"{path.name}: relevance: expected numbers from 0 on, one of them above 0")
    relevance = dict[int, dict[int, float]]()
    for at, place, worth in zip(query.tolist(), vector.tolist(), value.tolist(), strict=True):
        if relevance.setdefault(at, {}).setdefault(place, float(worth)) != float(worth):
            raise BadSamples(
                f"{path.name}: query {at} has two relevances for vector {place}, {relevance[at][place]:g} and "
                f"{worth:g}: expected one"
            )
    return relevance
