"""Closed forms that runs are held against: collectives, pipelines, memory.

Imports `runs`.
"""
