"""Families of models: a folder each with its config and its model, and a row in `rows.py`; what they share lies beside.

Imports `config`, `data`, `formats`, `ops`, `parallel`, `accounting`. A family speaks to the mesh by the verbs of
`parallel/collectives.py`. Neutral: `rows.py`, and each `huggingface.py`, the names of a family in other formats.
"""
