"""Bounds, in counts, of the work that an input which the conversion invented may ask of the original."""

ROOM = 64  # times as many passes of a loop, and elements of a value, as any sample needs are still made
PASSES_AT_LEAST = 1000
ELEMENTS_AT_LEAST = 1 << 16
