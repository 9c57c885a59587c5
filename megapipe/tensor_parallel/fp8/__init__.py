"""Products of linear layers of operands in eight bits."""
