"""Mutated files for every reader of other programs' files: only a ConfigError may result.

    python -m parity_tests.validation.fuzz FOLDER --examples 34000

One row of KINDS per kind of file. Each example is written in place of the valid file in FOLDER/<kind> and read by the
sides that read such files. Another error, a crash, an allocation above MEMORY or a reading of more than SECONDS ends
the process, and the file is left in place, as small as hypothesis can make it. Earlier failures are kept in
`parity_tests/validation/corpus/<kind>`: the tests read them each time, and mutations start from them too.
"""

import argparse
import faulthandler
import itertools
import json
import resource
import shutil
import signal
import struct
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save, save_file

from jaxdist.config import ConfigError, Model, check_shapes
from jaxdist.convert.content import Content
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds import dcp_files, hf, torch_files, torch_leaves, torch_numpy
from jaxdist.convert.kinds.torch_parts import MODEL as PARTS
from jaxdist.families.llama.config import Llama
from jaxdist.families.mixtral.config import Mixture
from jaxdist.families.resnet.config import ResNet
from jaxdist.formats.dcp_index import INDEX as DCP
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.hf import experiment_for, read_model, to_settings
from jaxdist.formats.safetensors_files import Tensors
from jaxdist.formats.torch_files import part
from jaxdist.runs.checkpoints import MANIFEST, complete_checkpoint, seal
from jaxdist.runs.display import console
from torch_ref.formats.hf import Weights

screen = Console(highlight=False)  # the fuzzer's own: readers print notes
CORPUS = Path(__file__).parent / "corpus"
MEMORY = 2_000_000_000
SECONDS = 10  # CPU seconds: a busy machine is no hang
BATCH = 5000  # hypothesis stores what it drew; a new batch starts without it

MODEL = Llama(layers=1, dim=4, heads=2, kv_heads=1, head_dim=2, hidden=6, vocab=5, positions=8)
CONFIG = to_settings(MODEL, "float32")
LONE = "model.norm.weight"  # in its own shard
# Their name, our name and the shape of some of its tensors.
NAMES = {
    "model.embed_tokens.weight": ("embed.weight", (5, 4)),
    "model.layers.0.self_attn.q_proj.weight": ("layers.0.attention.q_proj.weight", (4, 4)),
    "model.layers.0.self_attn.k_proj.weight": ("layers.0.attention.k_proj.weight", (2, 4)),
    "lm_head.weight": ("lm_head.weight", (5, 4)),
    LONE: ("norm.weight", (4,)),
}
TORCH = "a.pt"
OUTSIDE, LINK = "outside.safetensors", "link"
SECRET = 7.0  # value in the file outside of the folder, and in none within it


def tensors() -> dict[str, np.ndarray]:
    return {name: np.ones(shape, np.float32) for name, (_, shape) in NAMES.items()}


def links(folder: Path) -> None:
    """A link that leads out of the folder, and one that leads nowhere."""
    (folder / LINK).symlink_to(folder.parent / OUTSIDE)
    (folder / "loop").symlink_to(folder / "loop")


# Files around the one to mutate, and valid contents for it; all readers accept the first.


def around_safetensors(folder: Path) -> list[bytes]:
    """A model's tensors; others of other dtypes, empty and without dimensions; none."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    odd = {"half": np.zeros((2, 3), np.float16), "mask": np.ones(3, bool), "none": np.zeros((0, 4)), "": np.ones(())}
    odd |= {"bf": np.ones(2, ml_dtypes.bfloat16), LONE: np.ones(4, np.int64)}
    return [save(tensors(), metadata={"format": "pt"}), save(odd), save({})]


def around_index(folder: Path) -> list[bytes]:
    """Two shards, and a file outside that could replace one of them."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    places = {name: "2.safetensors" if name == LONE else "1.safetensors" for name in NAMES}
    for file in set(places.values()):
        save_file({name: array for name, array in tensors().items() if places[name] == file}, folder / file)
    save_file({LONE: np.full(4, SECRET, np.float32)}, folder.parent / OUTSIDE)
    links(folder)
    return [json.dumps({"metadata": {"total_size": 128}, "weight_map": places}).encode()]


def around_config(folder: Path) -> list[bytes]:
    """config.json of all families, with the keys of transformers 4 and 5; the weights fit the first."""
    save_file(
        {name: np.ones(entry.shape, np.float32) for name, entry in entries("huggingface", MODEL).items()},
        folder / SINGLE,
    )
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    five = {key: value for key, value in CONFIG.items() if not key.startswith("rope_")} | {"rope_parameters": rope}
    qwen = [MODEL.model_copy(update={name: True, "window": 3}) for name in ("qkv_bias", "qk_norm")]
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 2, "vocab_size": 5, "n_positions": 8}
    rotary = MODEL.model_dump(exclude={"family", "mlp_bias"}) | {"experts": 3}
    mixtures = Mixture(**rotary, family="mixtral"), Mixture(**rotary | {"qk_norm": True}, family="qwen3_moe")
    resnet = ResNet(family="resnet", block="basic", stem=4, depths=(1, 1), widths=(4, 4), image=8, classes=2)
    models: tuple[Model, ...] = (*qwen, *mixtures, resnet)
    more = [to_settings(model, "float32") for model in models]
    return [json.dumps(found).encode() for found in (CONFIG, *more, five, gpt2)]


def around_manifest(folder: Path) -> list[bytes]:
    """A checkpoint, and a file outside that could replace any of its files."""
    (folder / "deep").mkdir()
    for file in (folder / "a", folder / "deep" / "b", folder.parent / OUTSIDE):
        file.write_text("weights")
    seal(folder)
    links(folder)
    return [(folder / MANIFEST).read_bytes()]


def trained() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A model's weights, and the state of AdamW after a step."""
    weights = {n: torch.rand(entry.shape, requires_grad=True) for n, entry in entries("huggingface", MODEL).items()}
    optimizer = torch.optim.AdamW(weights.values())
    sum(tensor.sum() for tensor in weights.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {name: tensor.detach() for name, tensor in weights.items()}, optimizer.state_dict()


def around_torch(folder: Path) -> list[bytes]:
    """A script's file, with an optimizer and numpy's numbers; a state dict alone; and another program's zip."""
    weights, optimizer = trained()
    numbers = {"rng": np.random.RandomState(0).get_state(), "best": np.float64(2), "grid": np.ones((2, 3), ">i4").T}
    found = []
    for tree in {"model": weights, "optimizer": optimizer, "step": torch.tensor(3)} | numbers, weights:
        torch.save(tree, folder / TORCH)
        found.append((folder / TORCH).read_bytes())
    with zipfile.ZipFile(folder / TORCH) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / TORCH, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return [*found, (folder / TORCH).read_bytes()]


def around_dcp(folder: Path) -> list[bytes]:
    """The index of a script's checkpoint with the optimizer's state by names, and a file outside."""
    weights, optimizer = trained()
    state = {name: optimizer["state"][number] for number, name in enumerate(weights)}
    (folder.parent / OUTSIDE).write_bytes(b"weights")
    links(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        dcp.save({"model": weights, "optimizer": {"state": state}, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return [(folder / DCP).read_bytes()]


# Readers. An AssertionError names what was accepted and must not be.


def read_by_jaxdist(folder: Path) -> None:
    found = Tensors(folder)
    for name in found.described:
        array = found.read(name)
        assert (array.shape, array.dtype) == found.described[name]
        assert not (array == SECRET).any(), "read from outside of the folder"
    if not (folder / INDEX).exists():
        content = (folder / SINGLE).read_bytes()
        assert 8 + len(header(content)) + sum(t.bytes for t in found.described.values()) == len(content)


def read_by_torch(folder: Path) -> None:
    weights = Weights(folder, read_model(folder))
    found = {name: header.shape for name, header in weights.headers.items()}
    check_shapes("torch_ref", found, {name: shape for name, (_, shape) in NAMES.items()})
    for name, _ in NAMES.values():
        assert not (weights.read(name) == SECRET).any(), "read from outside of the folder"


def read_config(folder: Path) -> None:
    model = read_model(folder)
    assert model.layers * (model.experts or 1) < 1_000_000, "the tensors of each layer are looked for by name"
    assert model.input_kind == "tokens" or model.layers < 10_000, "the blocks are built one by one"
    hf.read_content(folder)


def read_config_by_torch(folder: Path) -> None:
    Weights(folder, read_model(folder)).check()


def read_manifest(folder: Path) -> None:
    try:
        complete_checkpoint(folder)
    except ConfigError as error:
        str(error).encode()  # the message is printed where another checkpoint replaces this one
        raise
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    assert not files.keys() & {LINK, f"../{OUTSIDE}"}, "read from outside of the folder"


def read_torch(folder: Path) -> None:
    file = folder / TORCH
    read_all(torch_files.read_content(file, experiment_for(MODEL.model_dump(), "fuzz")))
    found, right = torch_files.described(file), dict[str, Any]()
    with suppress(Exception), torch_numpy.allowed():  # refusals by torch itself show nothing
        tree = torch.load(file, weights_only=True)
        right = part(tree, PARTS) or tree
    for name in found.keys() & right:
        same = found[name].read().tobytes() == torch_leaves.to_numpy(right[name]).tobytes()
        assert same, "other numbers than those that torch reads"


def read_dcp(folder: Path) -> None:
    read_all(dcp_files.read_content(folder, experiment_for(MODEL.model_dump(), "fuzz")))


def read_all(content: Content) -> None:
    for leaves in content.groups.values():
        for leaf in leaves.values():
            array = leaf.read()
            assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype)


def assert_keys_once(text: bytes) -> None:
    def once(pairs: list[tuple[str, Any]]) -> None:
        assert len(dict(pairs)) == len(pairs), "a key was given twice"

    json.loads(text, object_pairs_hook=once)


class Kind(NamedTuple):
    """A kind of file: its name, its neighbours, its readers, suitable values, and where its JSON is."""

    file: str
    around: Callable[[Path], list[bytes]]
    readers: tuple[Callable[[Path], None], ...]
    values: tuple[str, ...]
    json_in: Callable[[bytes], bytes] = lambda content: content
    with_json: Callable[[bytes, bytes], bytes] = lambda text, _: text


def no_json(_: bytes) -> bytes:
    return b"null"


def header(content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length]


def with_header(text: bytes, content: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + content[8 + len(header(content)) :]


# Values are JSON texts.
PATHS = tuple(map(json.dumps, (f"../{OUTSIDE}", LINK, "loop", "deep", ".", "", "/dev/zero", "a\0", "x" * 5000)))
LAYOUTS = (
    "[1000000000000]", "[0,9223372036854775808]", "[4294967296,4294967296]", "[-1]", "[0,0]", str([1] * 70), "0", "4",
    "8", "16", "80", "18446744073709551616", '"F8_E4M3"', '"F4"', '"I64"', '"C64"', '"F31"',
)  # fmt: skip
SETTINGS = (
    "0", "-1", "1", "2", "10000", "1000000000000", "2147483647", "[10000]", "[2147483647]",
    '"4"', "4.0", "true", "1e400", '"llama"', '"gpt2"', '"gelu"',
    '"yarn"', '"llama3"', '["sliding_attention"]', '["full_attention"]', '{"rope_type":1}',
)  # fmt: skip
ABSURD = (
    "null", "true", "-1", "0", "1.5", "1e400", "-1e400", "NaN", "Infinity", "9" * 400, "9" * 5000, '""', "[]", "{}",
    '"\\ud800"', '"\\udc80"', f'"{"x" * 5000}"', "[" * 3000 + "]" * 3000, '{"":' * 3000 + "0" + "}" * 3000,
)  # fmt: skip
KINDS = {
    "safetensors": Kind(SINGLE, around_safetensors, (read_by_jaxdist, read_by_torch), LAYOUTS, header, with_header),
    "index": Kind(INDEX, around_index, (read_by_jaxdist, read_by_torch), PATHS),
    "config": Kind("config.json", around_config, (read_config, read_config_by_torch), SETTINGS),
    "manifest": Kind(MANIFEST, around_manifest, (read_manifest,), PATHS),
    "torch": Kind(TORCH, around_torch, (read_torch,), (), no_json),
    "dcp": Kind(DCP, around_dcp, (read_dcp,), (), no_json),
}

# Mutations.

Edit = Callable[[str, str], list[str]]  # a key (empty in a list) and its value -> the members that replace them


def member(key: str, value: str) -> str:
    return f"{key}:{value}" if key else value


def one_of(texts: list[str]) -> st.SearchStrategy[str]:
    """By index: hypothesis would print all of them, and some are long."""
    return st.integers(0, len(texts) - 1).map(lambda number: texts[number])


def edits(values: tuple[str, ...]) -> st.SearchStrategy[Edit]:
    """Another value, another key, both twice, neither, or an extra member."""
    key = st.text(max_size=4).map(json.dumps) | one_of([text for text in values if text[0] == '"'])
    value = one_of([*values, *values, *ABSURD]) | st.integers().map(str) | st.floats().map(json.dumps) | key
    return st.one_of(
        value.map(lambda new: lambda key, _: [member(key, new)]),
        key.map(lambda new: lambda key, old: [member(key and new, old)]),
        value.map(lambda new: lambda key, old: [member(key, old), member(key, new)]),
        st.just(lambda key, old: [member(key, old)] * 2),
        st.just(lambda *_: []),
        st.tuples(key, value).map(lambda new: lambda key, old: [member(key, old), member(key and new[0], new[1])]),
    )


def written(document: Any, changes: dict[int, Edit], numbers: Iterator[int]) -> str:
    """`document` as JSON. Members are numbered, and those in `changes` edited."""
    if not isinstance(document, dict | list):
        return json.dumps(document)
    named = document.items() if isinstance(document, dict) else (("", value) for value in document)
    members: list[str] = []
    for name, value in named:
        edit = changes.get(next(numbers), lambda key, old: [member(key, old)])
        key = json.dumps(name) if isinstance(document, dict) else ""
        members += edit(key, written(value, changes, numbers))
    return f"{{{','.join(members)}}}" if isinstance(document, dict) else f"[{','.join(members)}]"


def size(document: Any) -> int:
    """Number of members in `document`, at any depth."""
    inside = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return sum(1 + size(value) for value in inside)


def edited(kind: Kind, content: bytes) -> st.SearchStrategy[bytes]:
    """`content` with up to three members of its JSON edited."""
    document = json.loads(kind.json_in(content))
    places = st.integers(0, max(0, size(document) - 1))

    def change(changes: dict[int, Edit]) -> bytes:
        return kind.with_json(written(document, changes, itertools.count()).encode(), content)

    return st.dictionaries(places, edits(kind.values), min_size=1, max_size=3).map(change)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """`content` with up to three pieces removed, replaced by a few bytes, or preceded by them."""
    few = st.binary(max_size=8) | st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number))
    length = st.sampled_from((0, 1, 8, 40, len(content)))

    def change(changes: list[tuple[int, int, bytes]]) -> bytes:
        changed = content
        for place, cut, new in changes:
            changed = changed[:place] + new + changed[place + cut :]
        return changed

    return st.lists(st.tuples(st.integers(0, len(content)), length, few), min_size=1, max_size=3).map(change)


def mutations(kind: Kind, valid: list[bytes], failed: list[bytes]) -> st.SearchStrategy[bytes]:
    """One third each: edits of valid content, edits of earlier failures, damaged bytes of either."""
    with_json, before = ([content for content in some if is_json(kind.json_in(content))] for some in (valid, failed))
    return st.one_of(
        st.one_of([edited(kind, content) for content in with_json]),
        st.one_of([edited(kind, content) for content in before]),
        st.one_of([damaged(content) for content in valid + failed]),
    )


def is_json(text: bytes) -> bool:
    try:
        return bool(json.loads(text))
    except (ValueError, RecursionError):
        return False


# The harness.


def corpus(name: str) -> list[Path]:
    return sorted((CORPUS / name).iterdir())


def prepared(name: str, folder: Path) -> list[bytes]:
    """Create `folder` anew around the file to mutate; returns valid contents for it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    valid = KINDS[name].around(folder)
    assert accepted(name, folder, valid[0])
    return valid


def accepted(name: str, folder: Path, content: bytes) -> bool:
    """Whether all readers accept `content`. Raises foreign errors, and ends a process that hangs."""
    kind, taken = KINDS[name], True
    (folder / kind.file).unlink(missing_ok=True)  # a new file is cheaper than truncating
    (folder / kind.file).write_bytes(content)
    for reader in kind.readers:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            reader(folder)
            assert_keys_once(kind.json_in(content))
        except ConfigError as error:
            assert not isinstance(error.__context__, MemoryError), error
            taken = False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return taken


def fuzz(name: str, folder: Path, examples: int, start: int) -> tuple[int, int]:
    """Read mutations of a kind, drawn from the seed `start`; returns how many different files there were, and how many
    were accepted."""
    strategy = mutations(KINDS[name], prepared(name, folder), [file.read_bytes() for file in corpus(name)])
    different, taken = set(), 0
    set_hypothesis_home_dir(folder.parent)

    def example(content: bytes) -> None:
        nonlocal taken
        different.add(hash(content))
        taken += accepted(name, folder, content)

    batches = range(0, examples, BATCH)
    for batch, done in enumerate(track(batches, name, console=screen, disable=not screen.is_terminal)):
        some = settings(
            max_examples=min(BATCH, examples - done),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(start + batch)(some(given(strategy)(example)))()
    return len(different), taken


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.validation.fuzz", description="Read mutated files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--examples", type=int, default=100, help="number of examples of each kind (default 100)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    console.quiet = True
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGPROF, chain=True)  # prints where it hangs; then the process ends
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, virtual + MEMORY))
    for name in a.kinds:
        began = time.monotonic()
        different, taken = fuzz(name, a.folder / name, a.examples, a.seed)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        took = f"{time.monotonic() - began:.0f} s, peak {peak:.2f} GB"
        screen.print(f"{name}: {different:,} files, {taken:,} taken, {took}", soft_wrap=True)


if __name__ == "__main__":
    main()
