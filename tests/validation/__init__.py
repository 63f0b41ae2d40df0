"""The table of fields and the checks behind it."""
