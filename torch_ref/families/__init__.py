"""Families of models: plain modules, and a row each in `rows.py`. They reach other ranks through `context`,
`dispatch` and `images`, which `parallelize` sets, and through DTensors."""
