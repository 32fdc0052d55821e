"""Plugins are imported once, by command line, config or entry point; each mistake in one gets a message."""

import importlib
import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxdist.command_line.arguments import load, load_before_fields, parse
from jaxdist.command_line.plugins import load_named, plugins_at
from jaxdist.config import ConfigError, Experiment, exit_codes, plugins, registry
from jaxdist.config.registry import FAMILIES, Registry
from jaxdist.config.strategies import STRATEGIES, Strategy
from jaxdist.plan import arguments as plan_arguments

Package = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """package(name, source) -> name: a package on Python's path for one test."""
    monkeypatch.setattr(registry, "loaded", {})
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(name: str, source: str = "") -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return made


def test_a_config_and_the_command_line_name_plugins(package: Package, tmp_path: Path) -> None:
    first, second = package("first_plugin"), package("second_plugin")
    config = tmp_path / "config.toml"
    config.write_text(f'plugins = ["{first}"]\n[train]\nsteps = 3\n', encoding="utf-8")
    experiment = load(config, {"plugins": [second, first], "train.batch": "8"})
    assert experiment.plugins == tuple(registry.loaded) == (first, second)
    config.write_text(experiment.to_toml(), encoding="utf-8")
    assert load(config, {}) == experiment and plugins_at(tmp_path) == [first, second]


def test_the_option_may_be_given_several_times(package: Package) -> None:
    first, second, third = (package(f"{name}_of_three") for name in ("first", "second", "third"))
    arguments = ["--plugins", first, "--plugins", f"{second},{third}"]
    assert plan_arguments(arguments).fields["plugins"] == [first, second, third]
    assert parse(arguments, "jaxdist.train", "").experiment.plugins == (first, second, third)


OPTIONS = """
import jaxdist
from typing import Literal
from jaxdist.families.llama.config import Llama
class WithOption(Llama):
    family: Literal['with_option'] = 'with_option'
    odd_option: int = 3
jaxdist.register_family(jaxdist.Family('with_option', WithOption, 'jaxdist.families.llama.model:Llama'))
"""


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the families' rows after the test."""
    monkeypatch.setattr(FAMILIES, "_rows", dict(FAMILIES))
    monkeypatch.setattr(FAMILIES, "_owners", dict(FAMILIES._owners))


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize(
    ("flag", "path"),
    [("--config", "settings"), ("--config", "run"), ("--init", "run"), ("--init", "run/checkpoints/5")],
)
def test_options_of_a_family_that_a_config_or_run_names(flag: str, path: str, package: Package, tmp_path: Path) -> None:
    config = f'plugins = ["{package("optional_plugin", OPTIONS)}"]\n[model]\nfamily = "with_option"\n'
    (tmp_path / "run/checkpoints/5").mkdir(parents=True)
    for file in ("settings", "run/config.toml"):
        (tmp_path / file).write_text(config, encoding="utf-8")
    arguments = [flag, str(tmp_path / path), "--model.family", "with_option", "--model.odd_option", "7"]
    assert parse(arguments, "jaxdist.train", "").experiment.model.model_dump()["odd_option"] == 7


@pytest.mark.usefixtures("families")
def test_help_lists_the_rows_of_plugins(
    package: Package, strategies: Registry[Strategy], capsys: pytest.CaptureFixture[str]
) -> None:
    name = package("helping_plugin", OPTIONS + REGISTERS)
    with pytest.raises(SystemExit) as end:
        parse(["--plugins", name, "--help"], "jaxdist.train", "")
    help = capsys.readouterr().out
    assert end.value.code == 0 and "--model.odd_option" in help
    assert "--model.family llama|gpt2|mixtral|qwen3_moe|resnet|with_option" in help and "fsdp|odd" in help


def test_help_is_shown_beside_a_plugin_that_fails(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    name = package("helpless_plugin", "raise ValueError('no licence')")
    with pytest.raises(SystemExit) as end:
        parse(["--plugins", name, "--help"], "jaxdist.train", "")
    captured = capsys.readouterr()
    assert end.value.code == 0 and "--optimizer.name" in captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith("not in this help: plugin 'helpless_plugin': its import fails, ValueError: no licence (")


def test_a_config_without_plugins_does_not_speak_of_them() -> None:
    assert "plugins" not in Experiment().to_toml()


def test_a_plugin_is_imported_once(package: Package, tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("")
    name = package("counted_plugin", f"with open({str(count)!r}, 'a') as file:\n    file.write('1')\n")
    for _ in range(2):
        load_before_fields(["--plugins", name, "--mesh", "1x1"])
    assert count.read_text() == "1"


def test_a_rank_that_unpickles_an_experiment_loads_its_plugins(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(load(None, {"plugins": (name := package("ranks_plugin"))}))
    monkeypatch.setattr(registry, "loaded", {})
    assert pickle.loads(sent).plugins == tuple(registry.loaded) == (name,)


def test_entry_points_are_loaded_by_every_command(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, info = package("declared_plugin"), tmp_path / "declared-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[jaxdist.plugins]\nany = {name}\nother = missing_plugin:anything\n")
    plugins._declared.cache_clear()
    try:
        with pytest.raises(ConfigError, match="plugin 'missing_plugin', which the installed declared declares: there"):
            load_before_fields([])
        assert tuple(registry.loaded) == (name,)
        plugins._declared.cache_clear()
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nodd = a-b/c\n", encoding="utf-8")
        with pytest.raises(ConfigError, match="the installed declared declares 'a-b/c' in the entry points"):
            load_before_fields([])
    finally:
        plugins._declared.cache_clear()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import nothing_of_this_name",
            "its import fails, ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        (
            "x = 1\nraise ValueError('no licence')",
            "its import fails, ValueError: no licence \\(.*__init__.py, line 2\\)",
        ),
        ("def broken(:", "its import fails, SyntaxError: .*__init__.py, line 1\\)"),
        ("raise SystemExit('over')", "its import fails, SystemExit: over"),
        ("raise GeneratorExit", "its import fails, GeneratorExit \\("),
        ("import jaxdist\njaxdist.register_x", "its import fails, AttributeError: .* \\(\\S*__init__.py, line 2\\)"),
    ],
)
def test_an_import_that_fails_is_reported_by_its_own_message(package: Package, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^plugin 'failing_plugin': {message}.*; correct it, or leave it out of"):
        load_named([package("failing_plugin", source)])
    assert tuple(registry.loaded) == ()


@pytest.mark.parametrize("name", ["../x", ".", "a/b", ".a", "a..b", "1"])
def test_a_plugin_that_is_no_name_of_a_package(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^plugin {re.escape(repr(name))}: not the name of a package; give one as"):
        load_named([name])


def test_any_error_of_a_plugins_code_ends_a_command_with_one_message(
    package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    name = package("late_plugin", "def late():\n    return 1 / 0\n")
    load_named([name])
    with pytest.raises(SystemExit) as ended:
        exit_codes(lambda: importlib.import_module(name).late())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(
        "error: plugin 'late_plugin': its code fails, ZeroDivisionError: division by zero ("
    )

    def own() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # our own mistakes keep their traceback
        exit_codes(own)


SECTIONS = {
    "its config fails, AttributeError: 'Experiment' object has no": "    def check(self, e): return e.nothing",
    "its config fails, ZeroDivisionError: division by zero": "    def check_mesh(self, e, axes): 1 / 0",
    "its config fails, TypeError: 'int' object is not iterable": "    def mesh_sizes(self, parallel): return 3",
    "its config fails, KeyError: 'no words'": "    def describe(self): raise KeyError('no words')",
    "its config fails, TypeError: unhashable type: 'list'": "    sizes: list = []",
}


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("message", SECTIONS)
def test_errors_of_a_model_section_name_its_row(message: str, package: Package) -> None:
    source = (
        "from typing import Literal\nimport jaxdist\nfrom jaxdist.config import Decoder\nclass Own(Decoder):\n"
        f"    family: Literal['own'] = 'own'\n{SECTIONS[message]}\n"
        "jaxdist.register_family(jaxdist.Family('own', Own, 'a:b'))\n"
    )
    load_named([package("own_plugin", source)])
    with pytest.raises(ConfigError, match=f"^the family 'own' of plugin 'own_plugin': {message}"):
        found = Experiment.parse({"model": {"family": "own"}}, "test")
        found.check_mesh(found.parallel.axes())


def test_a_missing_plugin(package: Package) -> None:
    with pytest.raises(ConfigError, match=r"plugin 'nowhere.at_all': there is no such package on Python's path; "):
        load_named(["nowhere.at_all"])


def test_a_file_that_is_no_config_imports_nothing(package: Package) -> None:
    name = package("sneaky_plugin", "raise RuntimeError('imported')")
    values = json.loads(json.dumps({"plugins": [name]}))
    for more in ({}, {"model": {"family": "of_plugin"}, "optimizer": {"name": "of_plugin"}}):
        with pytest.raises(
            ConfigError, match=rf"^checkpoint: plugins = {name}: not loaded, .*add --plugins {name} if you trust .*$"
        ) as error:
            Experiment.parse(values | more, source="checkpoint")
        assert "\n" not in str(error.value)
    assert name not in sys.modules


@pytest.mark.parametrize("value", ["3", "[3]", "{a = 1}"])
def test_plugins_that_are_no_names(value: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"plugins = {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"plugins(\.0)? = .*: input should be a valid"):
        load(config, {})


REGISTERS = "import jaxdist\njaxdist.register_strategy(jaxdist.Strategy('odd', True, True, True))\n"


@pytest.fixture
def strategies(monkeypatch: pytest.MonkeyPatch) -> Registry[Strategy]:
    """The strategies, restored after the test."""
    monkeypatch.setattr(STRATEGIES, "_rows", dict(STRATEGIES._rows))
    monkeypatch.setattr(STRATEGIES, "_owners", dict(STRATEGIES._owners))
    return STRATEGIES


def test_a_package_that_others_import_owns_its_rows(package: Package, strategies: Registry[Strategy]) -> None:
    """Imported by hand before `load_plugins` imports it too, with its rows in another module."""
    name = package("by_hand", "from by_hand import rows")
    Path(sys.path[0], name, "rows.py").write_text(REGISTERS, encoding="utf-8")
    module = importlib.import_module(name)
    assert strategies.owner("odd") == "by_hand.rows"
    used = Experiment.parse({"parallel": {"strategy": "odd"}}, "test")
    assert used.plugins == ("by_hand.rows",) and Experiment.parse(used.model_dump(), "again") == used
    assert Experiment.parse({"plugins": [name]}, "the package that holds it").plugins == (name,)
    importlib.reload(module.rows)
    plugins.load_plugins([name])
    assert tuple(registry.loaded) == ("by_hand.rows", name)
    sys.modules.pop("by_hand.rows")


def test_an_import_that_is_tried_again_registers_its_rows_again(
    package: Package, strategies: Registry[Strategy]
) -> None:
    name = package("tried_again", f"{REGISTERS}raise ValueError")
    with pytest.raises(ConfigError, match="its import fails, ValueError"):
        plugins.load_plugins([name])
    file = Path(sys.path[0], name, "__init__.py")
    file.write_text(f"{REGISTERS}again = 'another size, so that no cached bytecode is taken'\n", encoding="utf-8")
    plugins.load_plugins([name])
    assert strategies.owner("odd") == name
    Path(sys.path[0], package("twice"), "__init__.py").write_text(2 * REGISTERS.replace("odd", "even"))
    with pytest.raises(ConfigError, match="twice registers the strategy 'even' twice; register it once"):
        plugins.load_plugins(["twice"])


def test_rows_of_a_script_are_its_own(strategies: Registry[Strategy]) -> None:
    loaded = tuple(registry.loaded)
    exec(REGISTERS, {"__name__": "__main__"})
    assert strategies.owner("odd") == "__main__" and tuple(registry.loaded) == loaded
    assert Experiment.parse({"parallel": {"strategy": "odd"}}, "test").plugins is None
