"""Settings of model.toml with a key or word that is not known, and the words of the refusal."""

from typing import Any

from tests.model_folders import tensor

X = tensor("x", "FP32", [-1, 4])
Y = tensor("y", "FP32", [-1, 3])
WRONG_WORDS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_batchsize": 3}, ["'max_batchsize'", "'max_batch_size'"]),
    ({"precission": {"level": "O1"}}, ["'precission'", "'precision'"]),
    ({"precision": {"levle": "O1"}}, ["[precision]", "'levle'", "'level'"]),
    ({"parity": {"max_eror_u": 3.0}}, ["[parity]", "'max_error_u'"]),
    ({"parity": {"max_tie": 0.1}}, ["[parity]", "'max_ties'"]),
    ({"batching": {"queue_size": 3}}, ["[batching]", "'max_queue_size'"]),
    ({"training": {"loss": "mae"}}, ["[training] loss = 'mae'", "l1"]),
    ({"training": {"loss": "own.py:loss"}}, ["training.loss = 'own.py'", "no such file"]),
    ({"training": {"metric": ["f1"]}}, ["[training]", "'metrics'"]),
    ({"training": {"metrics": ["f1", "precision"]}}, ["[training] metrics = 'precision'", "auroc"]),
    ({"inputs": [{**X, "dtype": "FP32"}]}, ["inputs[0]", "'dtype'", "'datatype'"]),
    ({"outputs": [Y, {**Y, "name": "z", "label": []}]}, ["outputs[1]", "'labels'"]),
    ({"inputs": [{**X, "picture": {"sizes": [1, 1]}}]}, ["inputs[0].picture", "'size'"]),
    ({"precision": {"level": "O4"}}, ["[precision] level", "'O4'", "O0, O1, O2, O3"]),
    ({"precision": {"level": "mixed_float61"}}, ["did you mean 'mixed_float16'"]),
    ({"precision": {"dtype": "fp61"}}, ["fp16, bf16"]),
    ({"precision": {"embeddings": "hlaf"}}, ["embeddings", "'half'"]),
    ({"form": "onx"}, ["form", "'onnx'"]),
    ({"inputs": [tensor("x", "FP23", [-1])]}, ["inputs[0].datatype", "'FP32'"]),
    ({"outputs": [{**Y, "kind": "logit"}]}, ["outputs[0].kind", "'logits'"]),
]
