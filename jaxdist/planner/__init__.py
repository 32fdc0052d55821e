"""What an experiment takes on a mesh, known in advance: memory, traffic and time."""
