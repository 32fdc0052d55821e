"""Models outside of our families, and the scripts that prove their ports."""
