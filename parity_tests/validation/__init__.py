"""Proof of the proof: planted mistakes, false alarms, hostile files, and the figures measured with them."""
