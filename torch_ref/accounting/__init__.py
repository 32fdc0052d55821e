"""Traffic, memory and arithmetic of a step, counted while it runs.

Imports `training` and the rooms below it.
"""
