"""Reads training scripts and names the mistakes that half precision makes easy. Only the syntax tree is looked at."""

from collections.abc import Sequence
from pathlib import Path

from . import autocast_rules, detached_rule, half_rules, scaler_rules
from .script_names import ScriptNames
from .training_script import Finding, read_script
from .value_types import ValueTypes


def lint(paths: Sequence[Path]) -> list[Finding]:
    """The findings of all scripts, by file and line. A line with ``# lint: allow RULE`` is not named.

    The scripts are read as one program: where one of them computes in FP16, modules of the others do too. Raises
    BadScript, OSError.
    """
    read = [ScriptNames(read_script(path)) for path in paths]
    in_half = any(names.uses_half for names in read)
    found: list[Finding] = []
    for names in read:
        types = ValueTypes(names, in_half)
        mine = [finding for rule in (*scaler_rules.RULES, *autocast_rules.RULES, *detached_rule.RULES)
                for finding in rule(names)]  # fmt: skip
        mine += [finding for rule in half_rules.RULES for finding in rule(names, types)]
        mine = [finding for finding in mine if not names.script.allows(finding.line, finding.rule)]
        found += sorted(set(mine), key=lambda one: (one.line, one.rule))
    return found
