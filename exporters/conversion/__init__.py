"""The ways to a version: from a model folder, from new weights, for a device."""
