"""The zoo's digits: a model folder like any user's. Start reading at ``model.toml``."""
