"""Closed forms of traffic and counts read from traced programs. Imports `config` and `parallel`."""
