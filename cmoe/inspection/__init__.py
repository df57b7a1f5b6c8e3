"""`cmoe inspect`: what a checkpoint is, from its headers alone."""
