"""What all tests share: the environment and compiled programs.

Tests of one process share 8 virtual CPU devices; what needs its own devices runs the command line.
"""

import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # empty in the first process, whose environment workers inherit
if not WORKER:
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = "32"  # as `make_mesh` has it
    # LLVM's optimizations double the time to compile, and XLA's own code for fusions doubles it again; what is tested
    # here is the program that they are given.
    quick = ["--xla_backend_optimization_level=0"]
    quick += ["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10.")  # later ones refuse it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick])
    # Many tests compile the same program; what one of them compiled serves the others, and only this session.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAXDIST_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="jaxdist-compiled-")
COMPILED = Path(os.environ["JAXDIST_TESTS_COMPILED"])
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED / WORKER)  # each its own: JAX does not write them atomically


def pytest_unconfigure() -> None:
    if not WORKER:
        shutil.rmtree(COMPILED, ignore_errors=True)
