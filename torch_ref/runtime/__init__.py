"""The process: start and end of ranks."""
