"""`cmoe demo`: one checkpoint run by transformers, then by cmoe, checked, timed."""
