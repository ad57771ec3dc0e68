"""Which precision every op has, and the rewriting of a captured program that gives it that."""
