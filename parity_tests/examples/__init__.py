"""Models that are none of our families, and the scripts that prove their ports."""
