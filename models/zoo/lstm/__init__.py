"""A model folder of the zoo. Start reading at ``model.toml``."""
