"""What a plan is chosen with and a half is judged on: given, made, moved about."""
