"""Traffic, memory and arithmetic of a step, counted."""
