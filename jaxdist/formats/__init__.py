"""Names, shapes and headers of files that others wrote, read by both sides; nothing here computes."""
