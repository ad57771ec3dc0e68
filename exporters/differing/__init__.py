"""Two engines for one model: the first tensor in which they differ by more than rounding explains."""
