"""What a run takes, as ratios of runs of this machine: `python -m jaxdist.bench`."""
