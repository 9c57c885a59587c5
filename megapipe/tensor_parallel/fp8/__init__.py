"""Matrix products of linear layers with operands quantised to FP8."""
