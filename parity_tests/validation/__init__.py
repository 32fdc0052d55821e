"""Validation of the proof: planted mistakes, false alarms, hostile files, and figures measured with them.

Imports any room.
"""
