"""Read training data: Megatron's token files and sample order, blends, tokenizers, microbatches.

A microbatch is a function of the number of consumed samples. Only `loader` needs torch, and
nothing in this package communicates with other processes.
"""
