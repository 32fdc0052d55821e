"""The parity suite: each test trains, resumes or reads on both sides and compares."""
