"""Weights and gradients of which a data-parallel rank keeps a share, and the whole only while passes use it."""
