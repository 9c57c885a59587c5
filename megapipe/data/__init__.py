"""Tokens: Megatron's files and sample order, blends, tokenizers, and microbatches as a function of consumed samples.

Only `loader` needs torch; nothing here talks to other processes.
"""
