"""Number formats of the expert weights: one file each, listed in `table.py`."""
