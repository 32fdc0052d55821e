"""Traffic and temporary memory by closed forms, and counts read from traced programs.

Imports `config`, `runtime`, `parallel`, `families`.
"""
