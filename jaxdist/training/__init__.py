"""One step of training and all it needs: program, optimizer, record, metrics, checkpoints.

Imports every room below it; not the converter, and not the planner: a family without closed forms trains too.
"""
