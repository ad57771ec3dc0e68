"""The form of ``--help``: an option that takes no value shows none."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


class CommandGroup(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


def _without_types_of_flags(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
