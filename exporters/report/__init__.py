"""One conversion told to people: a page with plots, and a table for the terminal."""
