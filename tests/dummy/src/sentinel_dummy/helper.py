"""What a plugin imports from its own package."""

FACTOR = 0.5
