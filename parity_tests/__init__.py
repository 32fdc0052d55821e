"""The proof: each side runs in a process of its own, and only the files that they wrote are compared."""
