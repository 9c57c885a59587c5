"""The plans that a search may try, as the user restricts them, and bounds of their steps."""
