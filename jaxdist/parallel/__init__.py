"""What a table of placements cannot say: programs that send between their own computations."""
