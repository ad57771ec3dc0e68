"""What was proven of halves with which libraries, on which processor, at which speed; and whether it is still so."""
