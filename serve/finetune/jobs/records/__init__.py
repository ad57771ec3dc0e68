"""The jobs, their events and their files in the store's database."""
