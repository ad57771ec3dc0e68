"""Reads training scripts and names the mistakes that half precision makes easy. Only the syntax tree is looked at."""

from collections.abc import Sequence
from pathlib import Path

from ....models.python_text.python_script import read_script
from . import (
    apex_rules,
    autocast_rules,
    detached_rule,
    half_rules,
    order_rules,
    scaler_rules,
    skipped_rules,
    weight_rules,
)
from .events import Events
from .finding import Finding
from .flow import Flow
from .script_names import ScriptNames
from .value_types import ValueTypes

_OF_EVENTS = (*order_rules.RULES, *skipped_rules.RULES, *autocast_rules.RULES, *apex_rules.RULES,
              detached_rule.step_of_another)  # fmt: skip
_OF_NAMES = (*scaler_rules.RULES, *detached_rule.RULES, autocast_rules.deprecated_names)


def lint(paths: Sequence[Path]) -> list[Finding]:
    """The findings of all scripts, by file and line. A line with ``# lint: allow RULE`` is not named.

    The scripts are read as one program: where one of them computes in FP16, modules of the others do too. Raises
    BadScript, OSError.
    """
    read = [ScriptNames(read_script(path)) for path in paths]
    in_half = any(names.uses_half for names in read)
    return [finding for names in read for finding in _of_script(names, in_half)]


def _of_script(names: ScriptNames, in_half: bool) -> list[Finding]:
    found = [finding for rule in _OF_NAMES for finding in rule(names)]
    flow = Flow(names)
    for reading in flow.readings:
        events = Events(flow, reading)
        found += [finding for rule in _OF_EVENTS for finding in rule(names, events)]
    found += [finding for rule in weight_rules.RULES for finding in rule(names, flow)]
    types = ValueTypes(flow, in_half)
    found += [finding for rule in half_rules.RULES for finding in rule(names, types)]
    found += autocast_rules.undecorated_function(names, in_half)
    # A helper that is called twice is read twice: one mistake of one line is named once.
    first = {
        (one.line, one.rule): one for one in reversed(found) if not names.script.allows(one.line, one.rule)
    }
    return [first[key] for key in sorted(first)]
