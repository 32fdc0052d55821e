"""Runs of both sides, in processes that stay: which are made, what they leave, how names and numbers compare."""
