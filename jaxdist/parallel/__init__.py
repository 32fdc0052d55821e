"""How arrays lie on a mesh of devices, and the collectives between them. Imports `config`, `ops`, `runtime`."""
