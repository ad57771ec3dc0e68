"""The losses that a fine-tuning may minimise: torch.nn.functional's names without ``_loss``, by the kind of output.

``nll_of_probabilities`` is ours: the logarithm of a probability with 1e-6 added, then torch's nll.
"""

import re
from collections.abc import Mapping

CLASS_LOSSES = ("cross_entropy", "nll", "multi_margin")
VALUE_LOSSES = (
    "mse", "l1", "smooth_l1", "huber", "bce_with_logits", "bce", "kl_div", "poisson_nll", "soft_margin",
)  # fmt: skip
IGNORED = -100  # torch's own ignore_index: the class of a target that is not learnt
NLL_OF_PROBABILITIES = "nll_of_probabilities"
# Of each kind of output that can be learnt; the first is the default.
LOSSES_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "logits": CLASS_LOSSES,
    "probabilities": (NLL_OF_PROBABILITIES,),
    **dict.fromkeys(("tensor", "score", "embedding", "image"), VALUE_LOSSES),
}
LOSSES = (*CLASS_LOSSES, NLL_OF_PROBABILITIES, *VALUE_LOSSES)
OWN_LOSS = re.compile(r"[^/\\:]+\.py:[A-Za-z_]\w*")  # a function of a file in the model folder
_LONG = {
    "binary_cross_entropy_with_logits": "bce_with_logits", "binary_cross_entropy": "bce",
    "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll", "MultiMarginLoss": "multi_margin", "MSELoss": "mse",
    "L1Loss": "l1", "SmoothL1Loss": "smooth_l1", "HuberLoss": "huber", "BCEWithLogitsLoss": "bce_with_logits",
    "BCELoss": "bce", "KLDivLoss": "kl_div", "PoissonNLLLoss": "poisson_nll", "SoftMarginLoss": "soft_margin",
}  # fmt: skip


def short_name(name: str) -> str:
    """torch's own name of a loss, function or class, as it is written here: ``l1_loss`` and ``L1Loss`` are ``l1``."""
    return _LONG.get(name, name.removesuffix("_loss"))
