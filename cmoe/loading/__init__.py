"""The load of weights: each tensor of a checkpoint to its place in a layer."""
