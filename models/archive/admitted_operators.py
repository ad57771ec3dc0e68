"""The operations that a program of an archive may have: those that capture produces, by a rule over torch's own table.

Capture gives ATen calls as a model's author wrote them: they compute, read, or write into tensors. The table has
more: operations that give uninitialised memory (``empty``, ``resize_``), that read beyond a tensor (``set_``,
``as_strided`` over a part of something larger), that touch files or print, that skip the check of an index, and the
inner parts of one kernel. Those are refused, so that a crafted program cannot read memory that is not its own.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SYMBOLIC = {"int", "float", "max", "min", "not", "ite", "sqrt", "sum"}  # torch.sym_…
_HIGHER_ORDER = {"wrap_with_autocast", "wrap_with_set_grad_enabled", "cond", "while_loop", "scan", "map_impl"}
_BUILTIN = {
    "_operator": {
        "getitem", "add", "mul", "sub", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "ge", "le", "gt",
        "lt", "eq", "ne", "and_", "or_", "not_", "lshift", "rshift",
    },
    "math": {"ceil", "floor", "trunc"},
}  # fmt: skip
# Begin with "_", and yet capture gives them. Any other such name is part of one kernel.
_PRIVATE = {
    "__and__", "__iand__", "__ior__", "__ixor__", "__lshift__", "__or__", "__rshift__", "__xor__",
    "__ilshift__", "__irshift__", "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "_cast_Byte", "_cast_Char", "_cast_Double", "_cast_Float", "_cast_Half", "_cast_Int",
    "_cast_Long", "_cast_Short", "_cdist_forward", "_conj", "_conj_physical", "_convolution", "_convolution_mode",
    "_dim_arange", "_euclidean_dist", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_functional_assert_async",
    "_functional_assert_scalar", "_functional_sym_constrain_range", "_functional_sym_constrain_range_for_size",
    "_is_all_true", "_is_any_true", "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex",
    "_linalg_svd", "_log_softmax", "_logcumsumexp", "_neg_view",
    "_pad_circular", "_pad_enum", "_prelu_kernel", "_safe_softmax", "_scaled_dot_product_attention_math",
    "_shape_as_tensor", "_softmax", "_stack", "_to_copy",
    "_trilinear", "_unique2", "_unsafe_view", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_weight_norm",
}  # fmt: skip
# These have no tensor among their arguments, and yet they show nothing: every element is written.
_FROM_NOTHING = {
    "arange", "bartlett_window", "blackman_window", "eye", "fft_fftfreq", "fft_rfftfreq", "full", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
    "range", "scalar_tensor", "sym_constrain_range", "sym_constrain_range_for_size", "tril_indices", "triu_indices",
    "zeros", "iota", "_assert_scalar", "_functional_assert_scalar", "_functional_sym_constrain_range",
    "_functional_sym_constrain_range_for_size",
}  # fmt: skip
_REFUSED = re.compile(
    # memory as it was found, or beyond the tensor
    r".*(empty|resize|strided|slice_inverse).*|set|set_|set_data|data|"
    # files, and what an inference has no use for
    r"from_file|pin_memory|record_stream|retain_grad|retains_grad|requires_grad_|output_nr|get_gradients|"
    r".*_backward.*|.*_jvp|embedding_renorm_?|"
    # layouts of their own, whose indices are believed
    r".*(sparse|nested|padded_tensor|flatten_dense_tensors).*|(?!fake_).*quantize.*|qscheme|int_repr|q_.*|"
    # kernels of one library
    r"(cudnn|miopen|mkldnn|mps|fbgemm|to_mkldnn|thnn|slow_conv)(_.*)?|.*_(mps|overrideable)|"
    # kernels that read beyond a tensor which does not fit: sizes or indices are not checked
    r"native_batch_norm|batch_norm_(stats|elemt|gather_stats.*|update_stats)|ctc_loss|fractional_max_pool[23]d|"
    r"max_unpool[23]d|segment_reduce|conv_depthwise3d|fused_moving_avg_obs_fake_quant|"
    # prims that copy between tensors and devices
    r"copy_to|device_put"
)
_STRIDED = "torch.ops.aten.as_strided.default"
_CLONED = "torch.ops.aten.clone.default"


def is_admitted(target: str) -> bool:
    """True if a node's target, as an archive writes it, may be there at all (for ``as_strided`` see
    `strided_fault`)."""
    words = target.split(".")
    if len(words) == 2 and words[0] in _BUILTIN:
        return words[1] in _BUILTIN[words[0]]
    if words[0] != "torch":
        return False
    if len(words) == 2:
        return target == "torch._sym_sqrt" or (words[1][:4] == "sym_" and words[1][4:] in _SYMBOLIC)
    if len(words) == 4:
        return words[1:3] == ["ops", "higher_order"] and words[3] in _HIGHER_ORDER
    return (
        len(words) == 5
        and words[1] == "ops"
        and words[2] in ("aten", "prims")
        and (target == _STRIDED or _is_plain_operation(*words[2:]))
    )


@functools.cache
def _is_plain_operation(space: str, name: str, overload: str) -> bool:
    """True if the operation is admitted, by its name and by the schema in torch's table."""
    known = f"{space}::{name}" + ("" if overload == "default" else f".{overload}")
    if _REFUSED.fullmatch(name) or known not in _table() or (name[0] == "_" and name not in _PRIVATE):
        return False
    schema = getattr(getattr(getattr(torch.ops, space), name), overload)._schema
    if any(argument.kwarg_only and argument.alias_info is not None for argument in schema.arguments):
        return False  # ``out=`` is resized where it is too small, and is then uninitialised memory
    return name in _FROM_NOTHING or any("Tensor" in str(argument.type) for argument in schema.arguments)


@functools.cache
def _table() -> frozenset[str]:
    """Every operation of torch's dispatcher: those of TorchScript alone (``aten::save``) are not among them."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def strided_fault(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The fault in the use of ``as_strided`` in the nodes of one graph; None where there is none.

    torch keeps it within the storage of its tensor. The storage of an input can be a larger buffer with other callers'
    rows, so it may only read a copy that the program made: ``as_strided(x.clone(), …)``.
    """
    copies = {
        output["as_tensor"]["name"]
        for node in nodes
        if node["target"] == _CLONED
        for output in node["outputs"]
        if "as_tensor" in output
    }
    for node in nodes:
        inputs = node["inputs"]
        named = [place for place, one in enumerate(inputs) if one["name"] == "self"]
        if node["target"] == _STRIDED and (
            named != [0] or inputs[0]["arg"].get("as_tensor", {}).get("name") not in copies
        ):
            return "as_strided of a tensor that is not a clone; write torch.as_strided(x.clone(), ...)"
    return None
