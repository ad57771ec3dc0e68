"""A half and its original run on the same questions, and what that proof can show."""
