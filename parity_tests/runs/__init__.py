"""Runs of both sides: the cases, the processes that make them, and how names and numbers compare.

Imports jaxdist and torch_ref; no other room.
"""
