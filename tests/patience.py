"""How long a test waits for what must come: far longer than it takes, as a machine may be busy with other things."""

PATIENCE_S = 600  # of a wait that ends as soon as that has come; only a test that fails waits so long
