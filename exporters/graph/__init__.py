"""The protocol between the planner and the back ends."""
