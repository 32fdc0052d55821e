"""Closed forms that a run is held against: traffic and memory, from the config alone."""
