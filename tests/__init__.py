"""The tests of cmoe, mirroring its modules."""
