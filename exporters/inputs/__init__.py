"""The samples that choose a plan and judge a half: given, generated, perturbed."""
