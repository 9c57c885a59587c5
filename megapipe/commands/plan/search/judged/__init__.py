"""Estimates of the steps of plans, in several processes, and the best plans so far."""
