"""Shard weights and gradients over data-parallel ranks, except while passes use them."""
