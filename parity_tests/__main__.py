"""Whether JAX and torch train the same run: `python -m parity_tests --config X --mesh 2x4 --output DIR`."""

import json
import sys
from collections.abc import Sequence

from rich.progress import track

from jaxdist.config import ConfigError, check_writable, exit_codes, parse
from jaxdist.config.display import console, say
from parity_tests.proof import Proof

NOT_EQUIVALENT = 3  # the exit code of any other verdict


def main(argv: Sequence[str] | None = None) -> None:
    """Arguments -> starting weights -> the runs of both sides -> verdict.json."""
    a = parse(sys.argv[1:] if argv is None else argv, "parity_tests", __doc__ or "")
    if a.output is None:
        raise ConfigError("--output DIR is missing: the folder for the runs and verdict.json")
    check_writable(a.output, f"--output {a.output}")
    if a.output.exists() and any(a.output.iterdir()):
        raise ConfigError(f"--output {a.output} is not empty; give another folder")
    if a.resume:
        raise ConfigError("--resume: a proof is made anew; leave it out")
    proof = Proof.of(a.experiment, a.output, a.device)
    start = proof.start(a.init)
    for side, kind in track(proof.needed(), description="runs", console=console, disable=not console.is_terminal):
        proof.run(side, kind, start)
    verdict = proof.verdict()
    (a.output / "verdict.json").write_text(json.dumps(verdict.as_json(), indent=2) + "\n", encoding="utf-8")
    say(verdict.sentence)
    if verdict.word != "equivalent":
        sys.exit(NOT_EQUIVALENT)


if __name__ == "__main__":
    exit_codes(main)
