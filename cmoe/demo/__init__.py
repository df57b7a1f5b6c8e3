"""`cmoe demo`: a checkpoint run by transformers, then by cmoe, checked against each other, timed."""
