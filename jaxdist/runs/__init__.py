"""Run folders on disk: checkpoints, metrics, locks, signals and the display of a run. Imports `config` alone."""
