"""Families of models: a folder each with its config, model, names in other formats and closed forms, and a row in
`rows.py`. Layers and loss that they share are modules beside the folders.

Imports `config`, `data`, `formats`, `ops`, `parallel`, `accounting`. A family speaks to the mesh by the operations of
`parallel/collectives.py`. Neutral, read by both sides: `rows.py`, and the `config.py` and `huggingface.py` of each.
"""
