"""A generator's loss on detached samples: no gradient reaches the generator, and its optimizer steps on none."""

import ast
from collections.abc import Iterator
from enum import IntEnum

from .events import Events
from .finding import Finding
from .own_code import dotted, given_to, method_of, receiver_of
from .script_names import ScriptNames
from .walk import Located, text_of

_DEEPEST = 40


class Reach(IntEnum):
    """The answer to the question: does a gradient flow from a loss to the generator that made its samples?"""

    NO = 0
    UNKNOWN = 1
    YES = 2


def detached_generator_loss(names: ScriptNames) -> Iterator[Finding]:
    """Only where each part of each loss before the step is known, and a detached sample of this generator is there."""
    for call, receiver, at in names.methods("step"):
        optimizer = dotted(call.args[0]) if receiver in names.scalers and call.args else receiver
        generator = names.optimizers.get(optimizer or "")
        if generator is None:
            continue
        losses = _losses_before(names, at)
        sources = _Sources(names, generator)
        stepped = {dotted(step.args[0]) if step.args else name for step, name, _ in names.methods("step")}
        idle = names.optimizers.keys() - stepped
        if (
            losses
            and not idle
            and all(sources.reach(loss, one) is Reach.NO for loss, one in losses)
            and sources.detached
        ):
            node = sources.detached[-1]
            assert isinstance(node.func, ast.Attribute)
            yield names.finding(
                node, "detached-generator-loss",
                f"{optimizer} in line {call.lineno} steps {generator} by a loss of detached samples, so no gradient "
                f"reaches {generator}: detach them for the discriminator's loss, not for the generator's",
                text_of(node.func.value),
            )  # fmt: skip


def step_of_another(names: ScriptNames, events: Events) -> Iterator[Finding]:
    """The loss reaches the module of one optimizer, which never steps, and another one steps."""
    stepped = {one.target for one in events.of("step", "plain-step")}
    for step in events.of("step"):
        generator = names.optimizers.get(step.target or "")
        since = max((one.order for one in events.before(step, "step")), default=-1)
        backwards = [one for one in events.before(step, "backward") if one.order > since]
        if generator is None or not backwards or len({one.at.frame for one in backwards}) > 1:
            continue
        losses = [(_loss(names, one.at.call, one.at.at), one.at.at) for one in backwards]
        if any(_Sources(names, generator).reach(loss, one) is not Reach.NO for loss, one in losses):
            continue
        reached = [
            other
            for other, owner in names.optimizers.items()
            if owner not in (None, generator)
            and any(_Sources(names, owner or "").reach(loss, one) is Reach.YES for loss, one in losses)
        ]
        argument = step.at.argument(0, "optimizer")
        while isinstance(argument, ast.Name) and argument.id in step.at.frame.arguments:
            argument = step.at.frame.arguments[argument.id][0]
        if len(reached) == 1 and reached[0] not in stepped and argument is not None:
            yield names.finding(
                argument, "other-optimizer",
                f"the loss before this step reaches {names.optimizers[reached[0]]}, the module of "
                f"{reached[0]}, and not "
                f"{generator}, whose optimizer steps: its gradients are none, or old ones",
                names.rewriting().replace(argument, reached[0]),
            )  # fmt: skip


def _loss(names: ScriptNames, call: ast.Call, at: Located) -> ast.expr:
    assert isinstance(call.func, ast.Attribute)
    value = call.func.value
    if isinstance(value, ast.Name) and (bound := names.last_value(value.id, at)) is not None:
        value = bound if "scale" in text_of(bound) else value
    return _unscaled(names, value, at)


def _losses_before(names: ScriptNames, at: Located) -> list[tuple[ast.expr, Located]]:
    """The losses whose `backward` is called between the step before and ``at``; none where other calls may do so."""
    steps = [one.order for _, _, one in names.methods("step")
             if one.place.scope is at.place.scope and one.order < at.order]  # fmt: skip
    begin = max(steps, default=-1)
    losses: list[tuple[ast.expr, Located]] = []
    for call, one in names.calls:
        if not begin < one.order < at.order or one.place.scope is not at.place.scope:
            continue
        method = getattr(call.func, "attr", None) or dotted(call.func) or ""
        if method == "backward" and isinstance(call.func, ast.Attribute):
            if one.place.conditions != at.place.conditions:
                return []
            losses.append((_unscaled(names, call.func.value, one), one))
        elif "backward" in method:
            return []
    return losses


def _unscaled(names: ScriptNames, loss: ast.expr, at: Located) -> ast.expr:
    """The loss of `scaler.scale(loss)`."""
    scaled = method_of(loss) == "scale" and dotted(receiver_of(loss)) in names.scalers
    return loss.args[0] if scaled and isinstance(loss, ast.Call) and loss.args else loss


class _Sources:
    """Follows an expression to the generator's calls; ``detached`` collects the `.detach()` on its samples."""

    def __init__(self, names: ScriptNames, generator: str) -> None:
        self._names, self._generator = names, generator
        self._functions = {
            one.node.name for one in names.all if isinstance(one.node, ast.FunctionDef | ast.ClassDef)
        }
        self.detached: list[ast.Call] = []

    def reach(self, node: ast.AST, at: Located, depth: int = 0) -> Reach:
        if depth > _DEEPEST:
            return Reach.UNKNOWN
        match node:
            case ast.Call():
                return self._of_call(node, at, depth)
            case ast.Name() | ast.Attribute():
                return self._of_name(node, at, depth)
            case ast.Lambda():
                return Reach.UNKNOWN
        return self._most([self.reach(child, at, depth + 1) for child in ast.iter_child_nodes(node)])

    def _of_call(self, call: ast.Call, at: Located, depth: int) -> Reach:
        name = dotted(call.func)
        if name in (self._generator, f"{self._generator}.forward"):
            return Reach.YES
        receiver = receiver_of(call)
        if receiver is not None and method_of(call) == "detach":
            if self.reach(receiver, at, depth + 1) is Reach.YES:
                self.detached.append(call)
            return Reach.NO
        if name in self._functions:
            return Reach.UNKNOWN
        parts, of_torch = given_to(call), (self._names.full(call.func) or "").startswith("torch.")
        # `self.D(x)` calls a module; `pred.mean()` computes with a value.
        if receiver is not None and not of_torch and dotted(receiver) != "self":
            parts.append(receiver)
        return self._most([self.reach(part, at, depth + 1) for part in parts])

    def _of_name(self, node: ast.Name | ast.Attribute, at: Located, depth: int) -> Reach:
        name = dotted(node)
        if name is None:
            return self._most([self.reach(child, at, depth + 1) for child in ast.iter_child_nodes(node)])
        if name == self._generator:
            return Reach.YES
        bound = self._names.values.get(name, [])
        here = [(value, one) for value, one in bound if one.place.scope is at.place.scope]
        if here:
            value = self._names.last_value(name, at)
            if value is None:
                return Reach.NO if all(isinstance(one.node, ast.For) for _, one in here) else Reach.UNKNOWN
            place = next(one for made, one in here if made is value)
            return self.reach(value, place, depth + 1)
        if bound:
            plain = all(isinstance(value, ast.Constant) for value, _ in bound)
            return Reach.NO if plain else Reach.UNKNOWN
        if isinstance(node, ast.Attribute):
            return self.reach(node.value, at, depth + 1)
        full = self._names.full(node) or ""
        return Reach.NO if full != name or name == "torch" else Reach.UNKNOWN

    @staticmethod
    def _most(found: list[Reach]) -> Reach:
        return max(found, default=Reach.NO)


RULES = (detached_generator_loss,)
