"""Rules 3, 4 and 5 of the parity gate: what was measured of one output, held against the limits of the spec.

Every comparison asks whether the good case holds, so that NaN fails.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...models.spec.spec import ParityLimits, TensorSpec
from . import refusals
from .measured import Measured
from .rule_verdicts import DecisionVerdict, Failure, OrderVerdict

MAX_ACCURACY_LOSS = 0.002


def min_sqnr_db(limits: ParityLimits, u: float) -> float:
    """The pooled signal-to-noise ratio asked for: 20·log10(1/u) − 10 unless the limits set it."""
    return limits.min_sqnr_db if limits.min_sqnr_db is not None else float(20 * np.log10(1 / u) - 10)


def error_faults(spec: TensorSpec, measured: Measured, limits: ParityLimits, u: float) -> Iterator[Failure]:
    """Rule 3: how large the error may be."""
    if not (measured.worst <= limits.max_error_u * u * measured.scale):
        yield refusals.error(spec, measured, limits, u)
    if not (measured.sqnr_db >= (minimum := min_sqnr_db(limits, u))):
        yield refusals.sqnr(spec, measured.sqnr_db, minimum)
    dead = [axis for axis in measured.axes if not (axis.worst_db >= limits.min_slice_sqnr_db)]
    if dead:
        yield refusals.slice_sqnr(spec, min(dead, key=lambda axis: axis.worst_db), limits.min_slice_sqnr_db)


def decision_faults(spec: TensorSpec, decisions: DecisionVerdict, samples: int) -> Iterator[Failure]:
    """Rule 4: what the numbers decide. ``samples``: how many were judged."""
    if not (decisions.kl_nats <= decisions.kl_limit):
        yield refusals.divergence_nats(spec, decisions)
    if not (decisions.flipped / max(decisions.decisions, 1) <= decisions.max_flips):
        yield refusals.flips(spec, decisions)
    if decisions.accuracy_original is None or decisions.accuracy_half is None:
        return
    allowed = max(MAX_ACCURACY_LOSS, 1 / samples)
    if not (abs(decisions.accuracy_half - decisions.accuracy_original) <= allowed + 1e-12):
        yield refusals.accuracy(spec, decisions, allowed)


def step_faults(spec: TensorSpec, measured: Measured, limits: ParityLimits) -> Iterator[Failure]:
    """Rule 2, of what comes from a step: how many elements may lie on its other side. One always may."""
    if measured.stepped and not (measured.tied <= max(limits.max_flips * measured.stepped, 1)):
        yield refusals.steps(spec, measured.tied, measured.stepped, limits.max_flips)


def under_limits(order: OrderVerdict, limits: ParityLimits) -> OrderVerdict:
    """The order as it was measured, beside what it may be."""
    return replace(
        order,
        max_ties=limits.max_ties,
        max_swaps=limits.max_swaps,
        min_top10_overlap=limits.min_top10_overlap,
    )


def order_faults(spec: TensorSpec, order: OrderVerdict) -> Iterator[Failure]:
    """Rule 5: what the numbers rank."""
    one = 1 if order.max_ties else 0  # among few pairs a single tie says nothing of a share
    if not (order.tied <= max(order.max_ties * order.pairs, one)):
        yield refusals.ties(spec, order)
    if not (order.swapped <= order.max_swaps * order.apart):
        yield refusals.swaps(spec, order)
    if not (order.top10_overlap is None or order.top10_overlap >= order.min_top10_overlap):
        yield refusals.top10(spec, order)
