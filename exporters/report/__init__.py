"""The report of one conversion: a page with plots, and a table for the terminal."""
