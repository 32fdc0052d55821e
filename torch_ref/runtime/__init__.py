"""The process: how ranks start and end.

Imports `jaxdist.config`, `jaxdist.runs`.
"""
