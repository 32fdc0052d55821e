"""Closed forms of FLOPs, memory and traffic that families build on, and counts read from traced programs.

A family adds its own as the `accounting` of its row (`forms.py`). Imports `config`, `ops`, `parallel`.
"""
