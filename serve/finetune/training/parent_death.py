"""The name under which HTTP workers find it."""

from ....models.order.ends_with_parent import die_with_the_parent

__all__ = ["die_with_the_parent"]
