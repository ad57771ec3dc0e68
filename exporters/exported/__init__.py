"""A proven half in a folder of its own, for another engine. The folder alone is enough to prove the half again."""
