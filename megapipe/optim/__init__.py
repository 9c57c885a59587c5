"""Flat buffers, the optimizer's rules, and the learning rate."""
