"""Speed of both sides on the same config, in pairs run one after the other: `python -m parity_tests.pace --mesh 2x4`.

Prints tokens/s of each run, the ratio of each pair (JAX / torch) and their median. Arguments are passed on to both.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from parity_tests.run import command

PAIRS, STEPS = 3, 40


def main(arguments: list[str]) -> None:
    """Run the pairs and print the ratios."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in track(range(1, PAIRS + 1), description="pairs"):
            rates = []
            for side in ("jaxdist", "torch_ref"):
                output = Path(folder) / f"{side}-{pair}"
                done = command(
                    f"{side}.train",
                    "--steps",
                    str(STEPS),
                    "--train.validation_batches",
                    "0",
                    "--output",
                    str(output),
                    *arguments,
                )
                if done.returncode:
                    sys.exit(done.stderr)
                rates.append(json.loads((output / "summary.json").read_text(encoding="utf-8"))["tokens_per_second"])
            ratios.append(rates[0] / rates[1])
            print(f"pair {pair}: jax {rates[0]:,.0f} tokens/s, torch {rates[1]:,.0f} tokens/s, ratio {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main(sys.argv[1:])
