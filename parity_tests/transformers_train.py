"""Earlier path of `runs.transformers_train`, for scripts."""

from parity_tests.runs.transformers_train import Double

__all__ = ["Double"]
