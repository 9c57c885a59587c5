"""Flat buffers, AdamW and the learning rate."""
