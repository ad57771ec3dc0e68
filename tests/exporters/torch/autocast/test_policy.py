"""The op lists are torch's own: a torch with other lists fails here, loudly, instead of rounding otherwise."""

from typing import Any

import pytest
import torch
from halfeven.exporters.torch.autocast.policy import CPU, CUDA, LISTS, OpLists, Rule, cuda_lists
from torch._ops import OpOverload

KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}

# Overloads that are on a list by their plain name, and whose callee torch registers: the cast happens there.
CALLS_A_LISTED_ONE = ("vec", "padding")
BELOW_A_LISTED_ONE = {"_cudnn_rnn"}  # which lstm, gru and rnn call; only a CUDA build has it
# Overloads that torch does not register either. With an out_dtype the caller has said what he wants; nothing of the
# product uses them.
OTHERS = {
    "cuda": {"addmm.dtype", "baddbmm.dtype", "bmm.dtype", "mm.dtype"},
    "cpu": {"addmm.dtype", "baddbmm.dtype", "bmm.dtype", "mm.dtype"},
}


@pytest.fixture(params=list(LISTS))
def lists(request: pytest.FixtureRequest) -> OpLists:
    return LISTS[request.param]


def entries(lists: OpLists) -> list[str]:
    return [*lists.lower, *lists.fp32, *lists.fp32_dtype, *lists.widest, *lists.banned]


def registered(device: str) -> set[str]:
    """``name`` or ``name.overload`` of every op for which this torch has an autocast kernel."""
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            if has_named_axes(schema):
                continue
            if torch._C._dispatch_has_kernel(full) and torch._C._dispatch_has_kernel_for_dispatch_key(
                full, KEYS[device]
            ):
                names.add(full.removeprefix("aten::"))
    return names


def has_named_axes(schema: Any) -> bool:
    """An overload for tensors with named axes, which torch had until 2.12 and torch.export never."""
    return "imname" in schema.overload_name or schema.overload_name.startswith("names")


def overload(name: str) -> OpOverload:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


def test_every_op_that_autocast_knows_is_on_our_list(lists: OpLists) -> None:
    known = registered(lists.device)
    assert len(known) > 100, "the registry was not read"
    missing = {name for name in known if lists.rule(overload(name)) is Rule.INPUT}
    assert missing - BELOW_A_LISTED_ONE == set()


def test_every_op_on_our_list_is_one_that_autocast_knows(lists: OpLists) -> None:
    known = registered(lists.device)
    plain = {name.partition(".")[0] for name in known}
    assert [name for name in sorted(entries(lists)) if name not in (known if "." in name else plain)] == []


def test_no_op_is_on_two_lists(lists: OpLists) -> None:
    names = entries(lists)
    assert sorted(names) == sorted(set(names))


def test_a_plain_name_claims_no_overload_that_autocast_leaves_alone(lists: OpLists) -> None:
    """The check is for overloads that take tensors and give new ones: the others meet no plan."""
    known, claimed = registered(lists.device), set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        listed = schema.name.startswith("aten::") and name in entries(lists) and full not in known
        if not listed or has_named_axes(schema):
            continue
        takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
        if takes_tensors and not writes and schema.overload_name not in CALLS_A_LISTED_ONE:
            claimed.add(full)
    assert claimed - OTHERS[lists.device] <= {
        "einsum.sublist", "index_put.hacked_twin", "_scaled_dot_product_flash_attention.quantized",
        "fake_quantize_per_tensor_affine.tensor_qparams",
    }  # fmt: skip


def test_the_lists_are_those_of_the_torch_that_runs() -> None:
    """The registries of 2.11.0, 2.12.0 and 2.13.0 were read: one name came in between."""
    aten, versions = torch.ops.aten, ("2.11.0+cu130", "2.12.0", "2.13.0+cpu")
    assert [cuda_lists(one).rule(aten.rms_norm.default) for one in versions] == [
        Rule.INPUT, Rule.FP32, Rule.FP32,
    ]  # fmt: skip
    assert [cuda_lists(one).rule(aten.layer_norm.default) for one in versions] == [Rule.FP32] * 3
    assert cuda_lists(torch.__version__) == CUDA


def test_an_overload_of_its_own_wins_over_the_plain_name() -> None:
    aten = torch.ops.aten
    assert CUDA.rule(aten.pow.Tensor_Scalar) is Rule.FP32
    assert CUDA.rule(aten.sum.dim_IntList) is Rule.FP32_DTYPE
    assert CUDA.rule(aten.conv2d.padding) is CUDA.rule(aten.conv2d.default) is Rule.LOWER
    assert CUDA.rule(aten.cat.default) is Rule.INPUT and CPU.rule(aten.cat.default) is Rule.WIDEST
    assert CUDA.rule(aten.binary_cross_entropy.default) is Rule.BANNED
    assert CPU.rule(aten.binary_cross_entropy.default) is Rule.FP32
