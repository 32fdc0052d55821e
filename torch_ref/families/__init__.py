"""Families of models: plain modules, and a row each in `rows.py`. What is split over ranks they meet as `context`,
`dispatch` and `images`, which `parallelize` gives them, and as DTensors."""
