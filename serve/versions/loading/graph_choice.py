"""CUDA graphs are used where batches were measured faster with them on this device, and nowhere else."""

import logging
from contextlib import suppress
from functools import partial

from ....models.engines.cuda_graphs import NotRecorded
from ....models.engines.faults import out_of_memory
from ....models.engines.switched_off import CUDA_GRAPHS, is_off
from ....models.engines.torch_engine import TorchEngine
from ....models.engines.wire_widening import as_sent
from ....models.errors import BadRequest, NotReady
from ....models.spec.buckets import buckets_of
from .candidate_forms import CandidateForm, ModelHere, free_memory
from .useful_rows import shortest_seconds

logger = logging.getLogger("halfeven.roster")
MUST_GAIN = 1.05  # times as fast over all sizes: less is noise, and recordings take memory


def choose_graphs(here: ModelHere, chosen: CandidateForm) -> list[str]:
    """Record every batch size of a warm engine on CUDA and keep the recordings where they are faster. Gives a sentence
    about it; none for other engines."""
    engine, spec, place = chosen.engine, here.spec, here.place
    if place.device.type != "cuda" or not isinstance(engine, TorchEngine):
        return []
    if is_off(CUDA_GRAPHS, place.device):
        return ["no CUDA graphs"]  # why is said with the other features that are off
    most = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    sizes = [rows for rows in buckets_of(spec, engine.device) if rows <= most] or [most]
    batches = [here.batch(rows) for rows in sizes]

    def seconds() -> float:
        return sum(place.call(partial(shortest_seconds, partial(engine.run, parts))) for parts in batches)

    try:
        eager = seconds()
        for parts in batches:
            for given in filter(None, (parts, as_sent(spec, parts))):
                with suppress(BadRequest):  # values cut to the wire's range may be no valid index
                    place.call(partial(engine.record, given))
        recorded = seconds()
        if recorded * MUST_GAIN <= eager:
            found = f"CUDA graphs for {len(sizes)} batch sizes, {eager / recorded:.3g} times as fast"
            within = f"; compared within the gate: {', '.join(engine.in_any_order)}"
            return [found + (within if engine.in_any_order else "")]
        why = f"CUDA graphs are not faster here ({eager / recorded:.3g} times)"
    except NotRecorded as error:
        why = f"no CUDA graphs: {error}"
    except NotReady:  # the server is stopping
        raise
    except Exception as error:  # whatever the device says, the program runs without them
        logger.exception("'%s' could not be recorded on %s", spec.name, place.device)
        why = f"no CUDA graphs: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    place.call(engine.forget_recordings)
    place.call(free_memory)
    try:
        here.warm_useful(chosen)  # else the first request of each size would wait for memory
    except Exception as error:
        if not out_of_memory(error):  # there may be memory when a request comes
            raise
    return [why]
