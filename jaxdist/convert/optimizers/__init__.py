"""Optimizer state, learning rates, schedules and loss scales of other trainers, as ours and back."""
