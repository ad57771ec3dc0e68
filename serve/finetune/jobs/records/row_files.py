"""The names of a job's files: the caller's two, and those that the reader of rows writes into the job's folder.

The reader's process imports nothing of the server's: half of its time would be the import of a web framework.
"""

from .....models.errors import BadSamples

TRAINING, VALIDATION = "training_file", "validation_file"
HELD_OUT, SEEN, ROWS = "held_out.safetensors", "seen.safetensors", "rows.json"


class BadTrainingFile(BadSamples):
    """A training file does not fit the model. ``param`` says which of the job's files, the message which rows."""

    code = "bad_training_file"
