"""Facts of a conversion as the report page shows them."""

import numpy as np
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.trial import Trial
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec

SPEC = ModelSpec(
    "digits",
    (TensorSpec("image", "FP32", (Dim(), Dim(8, 8))),),
    (TensorSpec("logits", "FP32", (Dim(), Dim(10, 10)), "logits"),),
    parity=ParityLimits(max_error_u=3.5, overridden=("max_error_u",)),
)
KEPT = {
    "node": "conv2d_3",
    "op": "aten.conv2d",
    "reason": "its output overflows half",
    "evidence": "absmax 81204",
}


def report(random: np.random.Generator, error: float) -> dict:
    original = random.standard_normal((40, 10)).astype(np.float32)
    half = original + np.float32(error) * random.standard_normal(original.shape).astype(np.float32)
    trial = Trial(tuple(range(40)), {"logits": original}, {"logits": half})
    named = Trial((0,), {"logits": original[:1]}, {"logits": half[:1]}, name="zeros")
    endless = Trial((0,), {"logits": original[:1] * np.nan}, {"logits": half[:1]}, name="longest")
    targets = {"logits": original.argmax(-1)}
    return judge(SPEC, "fp16", [trial], [named, endless], targets).to_json()


def facts(parity: dict, **changes) -> dict:
    form = {
        "passed": parity["passed"],
        "max_error_u": parity["max_error_u"],
        "sqnr_db": parity["sqnr_db"],
        "nodes": 24,
        "half_nodes": 21,
        "fp32_by_policy": 2,
        "kept": [KEPT],
        "casts": 3,
        "bytes": 129_024,
        "bytes_fp32": 258_048,
        "parity": parity,
        "error": None,
    }
    return {
        "model": "digits",
        "version": 3,
        "digest": "4f6b2e0c",
        "status": "live" if parity["passed"] else "refused",
        "reason": parity["summary"],
        "precision": {"level": "O1", "dtype": "fp16", "half": ["conv2d", "linear"]},
        "forms": {"torch": form},
        "samples": {"source": "given", "planning": 40, "judging": 40, "batch_sizes": [1, 2, 3, 64]},
        "environment": {"torch": "2.13.0", "device": "cpu"},
        "replay": "halfeven parity digits@3",
    } | changes


FINDINGS = {
    "recommendation": {"convert": False, "message": "half buys nothing here"},
    "curve": {
        "nodes": 3,
        "astray_u": 64.0,
        "points": [
            {"at": 0, "node": "linear_0", "op": "linear", "error_u": 0.5, "lost": False},
            {"at": 1, "node": "pow_1", "op": "pow", "error_u": 70.0, "lost": False},
            {"at": 2, "node": "sum_1", "op": "sum", "error_u": None, "lost": True},
        ],
        "first": {"at": 1, "node": "pow_1", "op": "pow", "error_u": 70.0, "lost": False},
    },
    "search": {
        "evaluations": 37,
        "unseen": 4096,
        "minimal": True,
        "before": {"passed": False, "error_u": None},
        "after": {"passed": True, "error_u": 1.8},
        "certificate": [{"node": "pow_1", "op": "pow", "error_u": 812.3, "reason": "it overflows"}],
    },
    "repairs": [{"node": "matmul_1", "what": "scaled by a power of two", "evidence": "214,003"}],
    "profile": {
        "nodes": 90,
        "batches": 2,
        "rows": [
            {
                "node": "exp_1",
                "op": "exp",
                "largest": 81204.0,
                "smallest": 1e-9,
                "of_range": 1.24,
                "vanish": 0.12,
                "denormal": 0.3,
                "over": 0.01,
                "sentinels": 0,
            }
        ],
        "guards": [{"node": "add_3", "constant": 1e-8}],
    },
    "weights": {"tensors": 7, "worst": [{"name": "head.weight", "worst_error": 0.25, "reason": "kept"}]},
    "casts": {
        "count": 40,
        "bytes": 4096,
        "bytes_before": 8192,
        "rows": [
            {
                "source": "linear_0",
                "from": "float32",
                "to": "float16",
                "bytes": 1536,
                "readers": ["relu_1", "cat_2"],
                "more": 3,
            }
        ],
    },
    "worst": {
        "output": "logits",
        "sample": 17,
        "row": 34,
        "error_u": 1.25,
        "inputs": [
            {
                "name": "image",
                "shape": [8, 8],
                "zeros": 3,
                "least": -1.5,
                "largest": 2.5,
                "mean": 0.125,
                "not_finite": 0,
            }
        ],
    },
}
