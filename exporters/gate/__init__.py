"""The parity gate: may this half stand in for that original? Arrays in, a verdict out."""
