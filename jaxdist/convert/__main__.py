"""Convert weights between Orbax checkpoints and Hugging Face folders, or list them."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxdist.config import ConfigError, check_writable, exit_codes, same_model
from jaxdist.config.arguments import Parser, load, user_path
from jaxdist.config.display import megabytes, say
from jaxdist.convert import mapped
from jaxdist.convert.kinds import KINDS, kind_of
from jaxdist.convert.mapped import holds_tensors
from jaxdist.convert.mapping import KeyMapping

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
# Files of a Hugging Face folder that say nothing of the weights, and go along to another one.
COMPANIONS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Arguments -> kind of the source -> read -> check -> cast -> write, or list."""
    a = arguments(sys.argv[1:] if argv is None else argv)
    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, and none should be held
    if a.mapping:
        convert_by(KeyMapping.load(a.mapping), a)
        return
    kind = kind_of(a.source)
    if a.inspect:
        inspect(a.source, kind, a.json)
        return
    target = a.to or next(other for other in KINDS if other != kind)
    experiment, parameters = KINDS[kind].read(a.source)
    if a.model:
        wanted = load(a.model, {})
        same_model(wanted.model, experiment.model, str(a.source))
        experiment = wanted
    dtype = a.dtype or "float32"
    parameters = {name: cast(name, array, dtype) for name, array in parameters.items()}
    with whole_or_nothing(a.target) as folder:
        KINDS[target].write(folder, experiment, parameters)
        if kind == target == "hf":
            for pattern in COMPANIONS:
                for file in a.source.glob(pattern):
                    shutil.copy(file, folder)
    total = sum(array.nbytes for array in parameters.values())
    say(f"wrote {len(parameters)} parameters, {megabytes(total)} in {dtype}, to {a.target}")


def arguments(argv: Sequence[str]) -> Any:
    """The command line. Raises ConfigError."""
    parser = Parser(prog="python -m jaxdist.convert", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run folder, a checkpoint or a Hugging Face folder"
    )
    parser.add_argument("target", type=Path, nargs="?", metavar="TARGET", help="folder to write; must not exist")
    parser.add_argument(
        "--to", choices=tuple(KINDS), help="kind of the target (default: the one that the source is not)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of the written weights (default float32; with --mapping, as they are)"
    )
    parser.add_argument(
        "--model",
        type=user_path,
        metavar="CONFIG",
        help="a TOML file or shipped config that the weights must fit; Orbax keeps it",
    )
    parser.add_argument(
        "--mapping",
        type=user_path,
        metavar="FILE",
        help="convert a model of your own by this key mapping: an Orbax checkpoint of a pytree <-> safetensors",
    )
    parser.add_argument(
        "--like",
        type=user_path,
        metavar="CHECKPOINT",
        help="with --mapping, from safetensors: an Orbax checkpoint with the tree and shapes to write",
    )
    parser.add_argument("--inspect", action="store_true", help="list the tensors of SOURCE: name, shape, dtype, bytes")
    parser.add_argument("--json", action="store_true", help="with --inspect: print one JSON object")
    a = parser.parse_args(argv)
    if a.inspect and a.target:
        raise ConfigError(f"--inspect with TARGET {a.target}: inspecting writes nothing; leave one of them out")
    if not a.inspect and a.target is None:
        raise ConfigError("TARGET is missing; give a folder to write, or --inspect to list the tensors of SOURCE")
    if not a.inspect and a.json:
        raise ConfigError("--json belongs to --inspect; leave it out")
    for option in ("to", "model", "inspect"):
        if a.mapping and getattr(a, option):
            raise ConfigError(f"--{option} with --mapping {a.mapping}: SOURCE tells the direction; leave it out")
    if a.like and not a.mapping:
        raise ConfigError("--like belongs to --mapping; leave it out")
    return a


def convert_by(mapping: KeyMapping, a: Any) -> None:
    """Convert a model that is none of our families, in the direction that SOURCE tells. Raises ConfigError."""
    theirs = holds_tensors(a.source)
    if theirs != bool(a.like):
        raise ConfigError(
            f"SOURCE {a.source} is torch's: give --like, an Orbax checkpoint with the tree and shapes to write"
            if theirs
            else f"--like {a.like}: SOURCE {a.source} is no safetensors file or folder and has a tree; leave it out"
        )

    def to_dtype(name: str, array: np.ndarray) -> np.ndarray:
        return cast(name, array, a.dtype) if a.dtype and array.dtype.kind not in "iub" else array

    with whole_or_nothing(a.target) as partial:
        if theirs:
            written = mapped.to_ours(a.source, partial, mapping, a.like, to_dtype)
        else:
            written = mapped.to_theirs(a.source, partial, mapping, to_dtype, single=a.target.suffix == ".safetensors")
    say(f"wrote {megabytes(written)} to {a.target}")


def cast(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` in `dtype`, rounded to nearest. Raises ConfigError where finite values become infinite."""
    with np.errstate(over="ignore"):
        result = array.astype(DTYPES[dtype])
    if not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise ConfigError(f"--dtype {dtype}: parameter {name} has values beyond its range; choose float32 or bfloat16")
    return result


@contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to; it becomes `target` when all went well, else it is removed.

    Raises ConfigError when `target` exists or cannot be made.
    """
    if target.exists():
        raise ConfigError(f"TARGET {target} exists; give a folder that does not")
    check_writable(target, f"TARGET {target}")
    partial = target.parent / f".{target.name}.partial"
    remove(partial)
    try:
        yield partial
        partial.rename(target)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """A file or a folder that may not be there."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def inspect(source: Path, kind: str, as_json: bool) -> None:
    """Print every tensor of the source, and the totals."""
    family, tensors = KINDS[kind].inspect(source)
    rows: list[Mapping[str, Any]] = [
        {"name": name, "shape": list(t.shape), "dtype": str(t.dtype), "bytes": t.bytes}
        for name, t in sorted(tensors.items())
    ]
    total = sum(row["bytes"] for row in rows)
    if as_json:
        listing = {"source": str(source), "kind": kind, "family": family, "tensors": rows, "bytes": total}
        print(json.dumps(listing))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        shape = "×".join(map(str, row["shape"]))
        say(f"{row['name']:{width}}  {shape:>16}  {row['dtype']:>8}  {row['bytes']:>15,}")
    say(f"{KINDS[kind].title}, family {family}: {len(rows)} tensors, {megabytes(total)}")


if __name__ == "__main__":
    exit_codes(main)
