"""The next process loads compiled programs, whatever happened to the files meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist.runtime.compilation_cache import Cache

pytestmark = pytest.mark.long

# Two collectives, which get numbers. Prints how many programs were requested, and how many of them were loaded; a
# program that is compiled after the command's context finds JAX as it was before.
SCRIPT = """
import jax
from jax.sharding import PartitionSpec as P
from jaxdist.runtime import compat, compilation_cache, xla
jax.config.update("jax_num_cpu_devices", 2)
asked, found = [], []
def hear(event, **_):
    asked.extend([1] * event.endswith("compile_requests_use_cache"))
    found.extend([1] * event.endswith("cache_hits"))
jax.monitoring.register_event_listener(hear)
changed = lambda: (
    compat.compilation_cache.get_file_cache,
    jax.config.jax_compilation_cache_dir,
    jax.config.jax_persistent_cache_min_compile_time_secs,
)
before = changed()
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
twice = lambda x: jax.lax.psum(jax.lax.psum(x, "x").sum() * x, "x")
mapped = jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=P("x"), out_specs=P()))
with compilation_cache.keep_compiled():
    assert xla.Jitted(mapped, mesh)(jax.numpy.ones(4)).sum() == 16
assert changed() == before
print(len(asked), len(found))
jax.jit(lambda x: 3 * x + 1)(2.0)
"""
PLAIN = "import jaxdist.runtime.xla as c; c.number_collectives = lambda module: None\n"


def start(home: Path, script: str = SCRIPT, **environment: str) -> tuple[int, int]:
    """Number of programs that a process requested, and number loaded from the cache. A warning is an error."""
    others = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    own = {"XDG_CACHE_HOME": str(home), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **environment}
    line = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, env=others | own)
    assert done.returncode == 0 and not done.stderr, done.stderr
    asked, found = map(int, done.stdout.split())
    return asked, found


def programs(home: Path) -> list[Path]:
    return sorted((home / "jaxdist" / "compiled").iterdir())


def test_a_second_start_loads_complete_entries(tmp_path: Path) -> None:
    asked, found = start(tmp_path)
    assert asked > found == 0 and len(programs(tmp_path)) == asked  # none that was compiled later
    assert (tmp_path / "jaxdist" / "compiled").stat().st_mode & 0o777 == 0o700
    half, other, *_ = programs(tmp_path)
    half.write_bytes(half.read_bytes()[:100])
    other.write_bytes(other.read_bytes()[:-1] + b"\0")
    assert start(tmp_path) == (asked, asked - 2)
    assert start(tmp_path) == (asked, asked)  # both were rewritten


def test_a_collective_of_another_number_is_another_program(tmp_path: Path) -> None:
    asked, _ = start(tmp_path)
    assert start(tmp_path, PLAIN + SCRIPT) == (asked, asked - 1)


@pytest.mark.parametrize("name", ["JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"])
def test_jax_is_asked_first(name: str, tmp_path: Path) -> None:
    value = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "chosen"), "JAX_ENABLE_COMPILATION_CACHE": "false"}[name]
    start(tmp_path / "home", **{name: value})
    assert not list((tmp_path / "home").rglob("*-*")) and (tmp_path / "chosen").exists() == value.endswith("chosen")


@pytest.mark.slow
def test_without_a_place_a_run_goes_without(tmp_path: Path) -> None:
    (tmp_path / "jaxdist").write_text("a file")
    assert start(tmp_path)[1] == 0 == start(tmp_path)[1]


@pytest.mark.slow
def test_jax_is_asked_how_many_bytes(tmp_path: Path) -> None:
    asked, _ = start(tmp_path, JAX_COMPILATION_CACHE_MAX_SIZE="-1")
    sizes = [file.stat().st_size for file in programs(tmp_path)]
    assert len(sizes) == asked > 1
    start(tmp_path / "fewer", JAX_COMPILATION_CACHE_MAX_SIZE=str(most := sum(sizes) - 1))
    assert 0 < sum(file.stat().st_size for file in programs(tmp_path / "fewer")) <= most
    start(tmp_path / "none", JAX_COMPILATION_CACHE_MAX_SIZE="0")
    assert not programs(tmp_path / "none")


def test_the_oldest_make_room(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most=300)
    for age, name in enumerate("abc"):
        cache.put(name, bytes(84))
        os.utime(tmp_path / name, (age, age))
    assert cache.get("a") == bytes(84)  # used most recently
    cache.put("d", bytes(84))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "c", "d"]
    assert cache.get("b") is None


def test_a_cache_that_cannot_be_written_is_left(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "removed", most=300)
    cache.put("a", b"program")
    assert cache.get("a") is None
