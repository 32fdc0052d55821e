"""Timings of this machine, as ratios of paired runs: `python -m jaxdist.bench`.

Imports any room, and the commands that it times.
"""
