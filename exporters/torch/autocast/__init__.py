"""The precision of every op of a captured program, and the rewrite that gives it that precision."""
