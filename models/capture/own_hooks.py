"""Hooks of the module that is captured: they see what its own forward takes and gives, not the flat tensors of `Flat`.

Runs in the child. Source of the order and the arguments of hooks: torch.nn.Module._call_impl.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def forward_with_hooks(module: "nn.Module") -> Callable[..., Any]:
    """The forward with the module's forward hooks around it, which are taken off the module."""
    forward, before, behind = module.forward, module._forward_pre_hooks, module._forward_hooks
    if not before and not behind:
        return forward
    module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()

    @functools.wraps(forward)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        for key, hook in before.items():
            if key in module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            elif (changed := hook(module, args)) is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        answer = forward(*args, **kwargs)
        for key, hook in behind.items():
            named = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
            changed = hook(module, args, *named, answer)
            answer = answer if changed is None else changed
        return answer

    return hooked
