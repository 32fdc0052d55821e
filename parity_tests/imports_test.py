"""Import rules: rooms import lower floors alone, both sides read the neutral rooms, and share nothing that computes."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from jaxdist.config.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}

# Rooms of each package, from the lowest floor up: as few floors as the imports allow. A module imports its own room and
# those on lower floors. `.` are the modules at the package's root: its commands.
FLOORS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "jaxdist": (
        ("config",),
        ("family rows", "ops", "runs"),
        ("formats", "runtime"),
        ("command_line", "data", "family names", "parallel"),
        ("accounting",),
        ("families",),
        ("training",),
        ("convert", "planner"),
        (".",),
        ("bench",),
    ),
    "torch_ref": (
        ("family rows", "runtime"),
        ("parallel",),
        ("families",),
        ("formats",),
        ("training",),
        ("accounting",),
        (".",),
    ),
    "parity_tests": (("runs",), ("expected",), ("proof",), ("report", "validation"), ("port", "."), ("examples",)),
}
# Rooms of jaxdist that both sides import.
NEUTRAL = ("config", "runs", "formats", "command_line", "data", "family rows", "family names")
# A family is one folder. Its modules that import no framework form rooms of their own.
PARTS_OF_FAMILIES = {
    r"families\.(rows|registry|\w+\.config)": "family rows",
    r"families\.\w+\.huggingface": "family names",
}
# The exception: rooms that name modules of higher floors in strings, imported on first use. They are the rows of
# registries, and names of `jaxdist.config` that have moved.
NAMED_ABOVE = {
    "jaxdist": {
        "config": {"family rows", "runs", "command_line", "data", "accounting", "training"},
        "family rows": {"families"},
        "formats": {"convert"},
    },
    "torch_ref": {"family rows": {"families"}},
    "parity_tests": {},
}


def source_files(folder: str) -> list[Path]:
    """Modules under `folder` that are not tests."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return [file for file in files if not file.name.endswith("_test.py") and file.name != "conftest.py"]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of `tree` except those for type checkers only."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
            yield from statements(node)


@cache
def imports(file: Path) -> frozenset[str]:
    """Dotted names of modules, and names within them, that a file imports at its top or inside a function."""
    found = set()
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def packages(file: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imports(file)}


def room_of(name: str) -> str:
    """Room of a dotted name: `config` of `jaxdist.config.model`, `.` of `jaxdist.train`, `family rows` of
    `jaxdist.families.llama.config`."""
    package, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    for pattern, part in PARTS_OF_FAMILIES.items():
        if re.match(rf"{pattern}(\.|$)", rest):
            return part
    return room if (ROOT / package / room / "__init__.py").is_file() and room else "."


def dotted(file: Path) -> str:
    """Module name of a file; ends in `__init__` for a package."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def rooms_imported(file: Path, package: str) -> set[str]:
    """Rooms of `package` that a file imports, without the package's own version."""
    inside = (name for name in imports(file) if name.startswith(f"{package}."))
    return {room_of(name) for name in inside} - ({"."} if f"{package}.__version__" in imports(file) else set())


@pytest.mark.parametrize("package", FLOORS)
def test_a_room_imports_rooms_on_lower_floors_alone(package: str) -> None:
    floors = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms}
    for file in source_files(package):
        own = room_of(dotted(file))
        for room in rooms_imported(file, package) - {own}:
            assert floors[room] < floors[own], f"{file.relative_to(ROOT)} imports {room}"


def named_modules(file: Path, package: str) -> set[str]:
    """The modules of `package` that a file names in strings: "package.module" or "package.module:name"."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {found[1] for text in texts if (found := re.fullmatch(r"([\w.]+?)\.?(?::\w+)?", text))}
    inside = [(name, ROOT / name.replace(".", "/")) for name in names if name.startswith(f"{package}.")]
    return {name for name, path in inside if path.is_dir() or path.with_suffix(".py").is_file()}


@pytest.mark.parametrize("package", FLOORS)
def test_only_registries_name_modules_of_higher_floors(package: str) -> None:
    floors = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms}
    found: dict[str, set[str]] = {}
    for file in source_files(package):
        own = room_of(dotted(file))
        for room in map(room_of, named_modules(file, package)):
            if own in floors and room != own and floors[room] >= floors[own]:
                found.setdefault(own, set()).add(room)
    assert found == NAMED_ABOVE[package]


def modules() -> dict[str, set[str]]:
    """Module -> modules of the three packages that it imports, at its top or inside a function."""
    files = {file: dotted(file) for p in FLOORS for file in source_files(p)}
    names = {file: name.removesuffix(".__init__") for file, name in files.items()}
    known = set(names.values())
    return {name: {*imports(file)} & known - {name, *parents(name)} for file, name in names.items()}


def parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(modules()).prepare()


@pytest.mark.parametrize("room", NEUTRAL)
def test_neutral_rooms_import_no_framework(room: str) -> None:
    files = [file for file in source_files("jaxdist") if room_of(dotted(file)) == room]
    assert files
    for file in files:
        assert not packages(file) & (JAX | {"torch", "torch_ref", "parity_tests"}), file


def test_torch_ref_imports_neutral_rooms_alone() -> None:
    for file in source_files("torch_ref"):
        assert not packages(file) & (JAX | {"parity_tests"}), file
        assert rooms_imported(file, "jaxdist") <= set(NEUTRAL), file


# Modules that read and write torch's own files.
TORCH_KINDS = (
    *("assembled", "dcp_files", "deepspeed_folders", "torch_compat", "torch_files", "torch_leaves"),
    *("torch_numpy", "torch_own", "torch_parts", "torch_records", "torch_zip"),
)
TORCH_FILES = {*(f"jaxdist.convert.kinds.{name}" for name in TORCH_KINDS), "jaxdist.convert.optimizers.rules"}
HF_REFERENCE = "jaxdist.convert.hf_reference"  # logits of another implementation, for --verify


def test_jaxdist_never_imports_torch() -> None:
    files = {dotted(file): file for file in source_files("jaxdist")}
    assert {*TORCH_FILES, HF_REFERENCE} <= {*files}
    for name, file in files.items():
        torch = set() if name in {*TORCH_FILES, HF_REFERENCE} else {"torch"}
        transformers = set() if name == HF_REFERENCE else {"transformers"}
        assert not packages(file) & (torch | transformers | {"torch_ref", "parity_tests"}), file


def test_comparison_needs_neither() -> None:
    """Comparison needs numpy alone, with its narrow dtypes."""
    assert packages(ROOT / "parity_tests/runs/compare.py") <= {"collections", "typing", "numpy", "ml_dtypes"}


@pytest.mark.parametrize("name", ["atoms", "mapping", "suggest", "transforms"])
def test_key_mappings_need_neither(name: str) -> None:
    assert not packages(ROOT / f"jaxdist/convert/mappings/{name}.py") & (JAX | {"torch"})


def test_models_see_no_mesh() -> None:
    """A family reaches the mesh through the functions of `parallel/collectives.py` alone."""
    for file in source_files("jaxdist/families"):
        assert not imports(file) & {"jaxdist.parallel.mesh", "jax.sharding.Mesh"}, file


# Functions of jax.lax that take a mesh axis: they communicate, or give a device's index.
OVER_AXES = {
    *("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute"),
    *("axis_index", "axis_size", "pcast", "pvary"),
}


def called(file: Path) -> set[str]:
    """Names of the functions that a file calls."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def test_families_call_no_collective(tmp_path: Path) -> None:
    for file in source_files("jaxdist/families"):
        assert not called(file) & OVER_AXES, file
    assert called(ROOT / "jaxdist/parallel/collectives.py") >= {"psum", "pmax", "axis_index"}
    file = tmp_path / "x.py"
    file.write_text("def f(x):\n    return jax.tree.map(lambda a: lax.psum(a, 'tensor'), x) + pmax(x, 'tensor')\n")
    assert called(file) & OVER_AXES == {"psum", "pmax"}


@pytest.mark.long
@pytest.mark.parametrize(
    "modules",
    [
        {
            "jaxdist": JAX | {"torch", "pydantic"},
            **dict.fromkeys(("torch_ref", "jaxdist.families.rows", "torch_ref.families.rows"), JAX | {"torch"}),
            **dict.fromkeys((f"jaxdist.{room}" for room in NEUTRAL if room.isidentifier()), JAX | {"torch"}),
            "jaxdist.families.mixtral.huggingface": JAX | {"torch"},
            "jaxdist.formats.plan": JAX | {"torch"},
            "jaxdist.bench.__main__": JAX | {"torch"},
        },
        {"jaxdist.train": {"torch", "orbax", "jaxdist.convert"}, "jaxdist.convert.__main__": {"torch"}},
        dict.fromkeys(("torch_ref.train", "torch_ref.formats.reader", "tensorstore", "jaxdist.formats.sources"), JAX)
        | {"parity_tests.runs.transformers_train": JAX},
    ],
    ids=["neither", "jaxdist", "torch_ref"],
)
def test_at_run_time(modules: Mapping[str, set[str]]) -> None:
    """Importing these in order by one process loads no forbidden module; training imports nothing that its first step
    does not need."""
    if "torch_ref.train" in modules:
        pytest.importorskip("torch")
    assert loaded(modules) == {}


def loaded(modules: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Module -> forbidden modules that are loaded after importing it, all in one process."""
    code = (
        "import json, sys\nfrom importlib import import_module\nfound = {}\n"
        "for name, forbidden in json.loads(sys.argv[1]).items():\n"
        "    import_module(name)\n"
        "    if wrong := sorted(set(sys.modules) & {*forbidden}):\n"
        "        found[name] = wrong\n"
        "print(json.dumps(found))"
    )
    given = json.dumps({name: [*forbidden] for name, forbidden in modules.items()})
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.long
def test_a_forbidden_module_is_found() -> None:
    assert loaded({"string": {"string.templates"}, "fractions": {"decimal"}}) == {"fractions": ["decimal"]}


def test_the_checks_find_forbidden_imports(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    lines = ["from jax.numpy import array", "import torch.nn", "from jaxdist.training import step"]
    file.write_text("def f():\n    " + "\n    ".join(lines))
    assert packages(file) >= {"jax", "torch"}
    assert rooms_imported(file, "jaxdist") == {"training"}
    circle = modules()
    circle["jaxdist.config.errors"].add("jaxdist.config.model")
    with pytest.raises(CycleError):
        TopologicalSorter(circle).prepare()


FAMILY_CLASSES = {"Llama", "GPT2", "Mixture", "Mixtral", "ResNet", "Decoder", "Rotary", "ImageModel"}
# Fields that not all families have; `tied` is also the name of a pipeline's group of ranks.
FAMILY_FIELDS = {name for row in FAMILIES.values() for name in row.config.model_fields} - {"family", "tied"}


Trees = Mapping[str, ast.AST]


@pytest.fixture(scope="module")
def outside() -> Trees:
    """Syntax trees of the modules outside `families`, by path."""
    files = [file for package in FLOORS for file in source_files(package) if "families" not in file.parts]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def classes_asked_for(tree: ast.AST) -> set[str]:
    """Class names that a module passes to `isinstance` or `issubclass`, compares types with, or matches."""
    nodes = list(ast.walk(tree))
    calls = (node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 2)
    tests = [call.args[1] for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass")]
    tests += [part for node in nodes if isinstance(node, ast.Compare) for part in node.comparators]
    tests += [node.cls for node in nodes if isinstance(node, ast.MatchClass)]
    inner = [node for test in tests for node in ast.walk(test)]
    names = {node.id for node in inner if isinstance(node, ast.Name)}
    return names | {node.attr for node in inner if isinstance(node, ast.Attribute)}


def test_nothing_outside_families_asks_for_a_family_by_class(outside: Trees) -> None:
    assert {name: found for name, tree in outside.items() if (found := classes_asked_for(tree) & FAMILY_CLASSES)} == {}


def families_compared(tree: ast.AST) -> set[str]:
    """Names of families with which a module compares something, or by which it matches it."""
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    constants = {node.value for part in compared for node in ast.walk(part) if isinstance(node, ast.Constant)}
    return {value for value in constants if isinstance(value, str)} & FAMILIES.keys()


def families_keyed(tree: ast.AST) -> set[str]:
    """Names of families that are keys of a module's tables."""
    tables = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    keys = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    return {key for key in keys if isinstance(key, str)} & FAMILIES.keys()


# Tables of models and configurations to train, by names that may be those of families.
CATALOGS = {"parity_tests/runs/cases.py", "parity_tests/validation/detection.py", "parity_tests/validation/loops.py"}


def test_nothing_outside_families_asks_for_a_family_by_name(outside: Trees) -> None:
    assert {name: found for name, tree in outside.items() if (found := families_compared(tree))} == {}
    others = {name: tree for name, tree in outside.items() if name not in CATALOGS}
    assert {name: found for name, tree in others.items() if (found := families_keyed(tree))} == {}


def test_a_question_for_a_name_is_found() -> None:
    lines = (
        "a = m.family == 'gpt2', 'llama' != f, name in ('mixtral', *more)",
        "match x:\n    case 'qwen3_moe' | 'b': pass",
        "c = {'family': 'resnet'}",
    )
    assert families_compared(ast.parse("\n".join(lines))) == {"gpt2", "llama", "mixtral", "qwen3_moe"}
    assert families_keyed(ast.parse("A = {'a': {'llama': 1, **more, key: 'gpt2'}}[m.family]")) == {"llama"}


def fields_asked_for(tree: ast.AST) -> set[str]:
    """Fields of families of which a module asks whether, or with which value, a model has them."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) >= 2)
    probes = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")]
    names = [name for model, name, *_ in probes if MODEL.search(ast.unparse(model))]
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    names += [node.left for node in compared if FIELDS.search(ast.unparse(node.comparators[0]))]
    return {str(name.value) for name in names if isinstance(name, ast.Constant)} & FAMILY_FIELDS


MODEL = re.compile(r"(^|\.)(m|model)$")
FIELDS = re.compile(r"(?<!type\(self\))\.model_fields$")  # of another object than the section itself


def test_nothing_outside_families_probes_a_model_for_a_field(outside: Trees) -> None:
    assert {name: found for name, tree in outside.items() if (found := fields_asked_for(tree))} == {}


def test_a_probe_for_a_field_is_found() -> None:
    lines = (
        "a = getattr(e.model, 'experts', 0), hasattr(model, 'gelu')",
        "b = getattr(module, 'bias'), getattr(m, name), 'block' in type(self).model_fields",
        "c = 'kv_heads' not in type(m).model_fields",
    )
    assert fields_asked_for(ast.parse("\n".join(lines))) == {"experts", "gelu", "kv_heads"}


def test_a_question_for_a_class_is_found() -> None:
    lines = (
        "a = isinstance(x, Llama | config.GPT2), issubclass(c, Mixture), type(x) is Rotary",
        "match x:\n    case ResNet(): pass",
    )
    assert classes_asked_for(ast.parse("\n".join(lines))) == {"Llama", "GPT2", "config", "Mixture", "Rotary", "ResNet"}
