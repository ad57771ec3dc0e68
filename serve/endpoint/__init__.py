"""The operator's own pre- and postprocessing beside a model, in a process of its own."""
