"""Makes a published version of new weights, in a process of its own, which ends when the server ends.

    python -m halfeven.serve.finetune.jobs.weights_to_version REQUEST.json

Reports one JSON object per line on stdout: ``{"type": "stage", …}`` while it works, ``{"type": "done", …}`` or
``{"type": "failed", …}`` at the end. Its stdin is a pipe from the server: when that closes, the process ends. It also
ends at once, busy or not, when the server is killed (`models/order/ends_with_parent.py`): only the next server
converts and publishes.
"""

import gc
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

gc.disable()  # nothing of what is imported is garbage: to go through it again and again takes a quarter of the time
import torch  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from ....exporters.conversion.retrain import with_new_weights  # noqa: E402
from ....exporters.inputs.samples import load_samples, stored_samples  # noqa: E402
from ....exporters.proof.prove import Answers  # noqa: E402
from ....exporters.proof.subject import FurtherVerdict  # noqa: E402
from ....models.errors import HalfevenError  # noqa: E402
from ....models.files.durable import no_space_left  # noqa: E402
from ....models.order.ends_with_parent import reporting  # noqa: E402
from ....models.order.one_order import one_order  # noqa: E402
from ....models.order.order_settings import order_bounds  # noqa: E402
from ....models.store.store import Store  # noqa: E402
from ..judging.gate import GateTerms, by_set, judge, predictions  # noqa: E402
from ..judging.judging_sets import sets_of, with_joined  # noqa: E402
from ..training.loop.setting_names import STATE_FILE  # noqa: E402
from .records.job_types import DISK_FULL, DISK_FULL_MESSAGE  # noqa: E402

gc.freeze()
gc.enable()


def main() -> None:
    """Run one request. The last line is always one of ``done`` and ``failed``."""
    request, report = reporting(sys.argv[1])
    threading.Thread(target=_leave_with_the_server, daemon=True).start()
    torch.set_num_threads(request["threads"])

    def end(error: HalfevenError) -> None:
        report(_failed(error))
        os._exit(1)

    try:
        with one_order(order_bounds(request["at_once"])) as order, order.watched(end):
            last = _convert(request, lambda stage: report({"type": "stage", "stage": stage}))
    except HalfevenError as error:
        last = _failed(error)
    except Exception as error:
        code, message = "INTERNAL", f"{type(error).__name__}: {error}"
        if no_space_left(error):
            code, message = DISK_FULL, DISK_FULL_MESSAGE
        last = {"type": "failed", "code": code, "message": message}
    report(last)


def _convert(request: Mapping[str, Any], notify: Any) -> dict[str, Any]:
    store = Store(Path(request["store"]))
    parent = store.version(request["model"], request["parent"])
    spec = parent.spec()
    terms = GateTerms(**request["terms"])
    judged_by = store.version(request["model"], terms.against)
    seen, held_out = (load_samples(Path(request[name]), spec) for name in ("seen", "held_out"))
    sets = sets_of(judged_by, held_out)
    active = by_set(load_file(request["active"]))

    def further(forms: Mapping[str, Answers]) -> FurtherVerdict:
        notify("judging")
        found = {
            form: {name: predictions(spec, answers, samples, terms.metrics) for name, samples in sets.items()}
            for form, answers in forms.items()
        }
        return judge(spec, sets, found, active, terms)

    def shown(line: str) -> None:
        if line.startswith("proving"):
            notify("proving")

    samples = with_joined(spec, stored_samples(judged_by), seen, held_out)
    lineage = {**request["lineage"], "samples_joined": samples is not None}
    origin = {"parent": request["parent"], "lineage": lineage, "awaits_promotion": True}
    weights = Path(request["weights"])
    state = weights.with_name(STATE_FILE)  # beside the weights, where the job keeps it
    beside = (state,) if state.is_file() else ()
    version = with_new_weights(
        parent, weights, store, origin, further, shown, samples, beside
    )  # fmt: skip
    return {
        "type": "done",
        "version": version.number,
        "status": version.status,
        "reason": version.manifest["reason"],
        "gate": version.manifest["gate"],
    }


def _failed(error: HalfevenError) -> dict[str, Any]:
    return {"type": "failed", "code": error.code.upper(), "message": str(error)}


def _leave_with_the_server() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
