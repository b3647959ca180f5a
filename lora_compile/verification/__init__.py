"""Proof of numbers: log-probabilities of the product against a float32 reference.

`reference`: the model in dense float32 with explicit deltas. `served`: what the product gives for
given texts, through the graphs that serve. `figures`: how two runs differ. `gates`: the limits.
"""
