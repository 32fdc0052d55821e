"""Memory, traffic and time of an experiment on a mesh, known before it runs.

Imports `training` and the rooms below it.
"""
