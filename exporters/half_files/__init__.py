"""Proven halves as files of their own: written with their proofs beside them, verified, and held over upgrades."""
