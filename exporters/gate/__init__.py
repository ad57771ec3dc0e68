"""The parity gate: may this half stand in for that whole? Arrays in, a verdict out."""
