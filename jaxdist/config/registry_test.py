import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import pytest

from jaxdist import Family, register_family
from jaxdist.config import ConfigError, Decoder, Experiment, registry
from jaxdist.config.data import DataSource
from jaxdist.config.model import model_differences
from jaxdist.config.optimizer import UpdateRule
from jaxdist.config.plugins import function, named, optional
from jaxdist.config.registry import BUILT_IN, FAMILIES, Owner, Registry, default_family, described_families, resolve
from jaxdist.config.section import Count
from jaxdist.config.strategies import Strategy
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama


class Toy(Decoder):
    """A decoder of
    toys. No more."""

    free: ClassVar[frozenset[str]] = Decoder.free | {"scale"}

    family: Literal["toy"]
    scale: float = 3.0
    experts: Count = 4


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family `toy`, for one test."""
    assert "llama" in FAMILIES  # loads the built-in families before the copy
    monkeypatch.setattr(registry, "loaded", {})
    monkeypatch.setattr(FAMILIES, "_rows", dict(FAMILIES))
    monkeypatch.setattr(FAMILIES, "_owners", dict(FAMILIES._owners))
    aliases = {"toymodel toy2": "with model.scale = 2"}
    register_family(Family("toy", Toy, "nowhere.model:Toy", aliases=aliases))


@pytest.mark.usefixtures("toy")
def test_a_registered_family_is_read_and_written() -> None:
    e = Experiment.parse({"model": {"family": "toy", "dim": 64}}, source="test")
    assert isinstance(e.model, Toy) and (e.model.dim, e.model.scale) == (64, 3.0)
    assert 'family = "toy"\nscale = 3.0' in e.to_toml()
    with pytest.raises(ConfigError, match=r"^test: model.scal = 1: no such field; did you mean 'scale'\?$"):
        Experiment.parse({"model": {"family": "toy", "scal": 1}}, source="test")
    with pytest.raises(ConfigError, match=r"choose one of 'llama', .*, 'resnet', 'toy'"):
        Experiment.parse({"model": {"family": "other"}}, source="test")


def test_a_family_says_which_fields_its_weights_leave_free() -> None:
    other = Toy(family="toy", scale=4.0, init_std=1.0, vocab_multiple=64)
    assert model_differences(Toy(family="toy"), other) == {}
    assert model_differences(Toy(family="toy"), other.model_copy(update={"experts": 2})) == {"experts": (4, 2)}
    rotary, learned = Llama(positions=8), GPT2(family="gpt2", positions=8)
    assert model_differences(rotary, Llama(positions=9)) == {}
    assert model_differences(learned, GPT2(family="gpt2", positions=9)) == {"positions": (8, 9)}


@pytest.mark.usefixtures("toy")
def test_a_registered_family_is_in_help_and_hints() -> None:
    assert described_families().endswith("; toy: A decoder of toys")
    with pytest.raises(ConfigError, match=r"no such family; 'Toy2' is 'toy' here, with model.scale = 2$"):
        Experiment.parse({"model": {"family": "Toy2"}}, source="test")
    with pytest.raises(ConfigError, match=r"no such family; 'mixtralforcausallm' is 'mixtral' here$"):
        Experiment.parse({"model": {"family": "mixtralforcausallm"}}, source="test")


@pytest.mark.usefixtures("toy")
def test_a_mesh_of_experts_asks_for_the_families_that_have_some() -> None:
    experiment = Experiment.parse({"parallel": {"mesh": "expert=2"}}, source="test")
    with pytest.raises(ConfigError, match=r"or model.family = mixtral or qwen3_moe or toy$"):
        experiment.check_mesh(experiment.parallel.axes())


@pytest.mark.usefixtures("toy")
def test_a_taken_name_is_refused_with_both_owners() -> None:
    row = Family("toy", Toy, "nowhere.model:Toy")
    with pytest.raises(ConfigError, match=f"other registers the family 'toy', a name that {__name__} has taken"):
        FAMILIES.register(row, Owner("other"))
    with pytest.raises(ConfigError, match=r"'llama': its config .*Toy has no such family; declare there family: Lit"):
        Family("llama", Toy, "nowhere.model:Toy")


@pytest.mark.usefixtures("toy")
def test_a_wrapper_of_pythons_library_does_not_own_rows_registered_through_it() -> None:
    assert FAMILIES.owner("toy") == __name__
    wrapper = contextmanager(lambda: (_ for _ in [None]))
    wrapper()(register_family)(row := Family("toy", Toy, "nowhere.model:Toy"))
    assert FAMILIES["toy"] is row and FAMILIES.owner("toy") == __name__


def test_built_in_rows_are_registered_first() -> None:
    others: Registry[DataSource] = Registry("row", DataSource, "jaxdist.families.rows")
    assert default_family() == "llama" and [*others] == []
    others.register(DataSource("a"), Owner("one"))
    assert others["a"] == DataSource("a") and others.owner("a") == "one"


def test_a_row_replaces_that_of_an_earlier_import_of_the_same_package() -> None:
    rows: Registry[DataSource] = Registry("row", DataSource)
    first = Owner("mine.rows")
    rows.register(DataSource("a"), first)
    with pytest.raises(ConfigError, match=r"mine.rows registers the row 'a' twice; register it once"):
        rows.register(DataSource("a"), first)
    for owner in (Owner("mine2"), Owner("mine.other")):
        with pytest.raises(ConfigError, match=f"{owner.name} registers the row 'a', a name that mine.rows has taken"):
            rows.register(DataSource("a", files=True), owner)
    for owner in (Owner("mine.rows"), Owner("mine")):
        rows.register(found := DataSource("a", owner.name), owner)
        assert rows["a"] is found and rows.owner("a") == owner.name


def test_a_row_is_named_with_who_registered_it() -> None:
    rows: Registry[DataSource] = Registry("row", DataSource)
    for name, owner in (("a", BUILT_IN), ("b", Owner("one")), ("c", Owner("__main__"))):
        rows.register(DataSource(name), owner)
    owners = ["the built-in row 'a'", "the row 'b' of plugin 'one'", "the row 'c' of the script that runs"]
    assert [named(rows, name) for name in "abc"] == owners


def test_references() -> None:
    assert resolve("jaxdist.config:Decoder") is Decoder and resolve(Toy) is Toy
    for wrong in ("nowhere:x", "jaxdist.config:Nothing", "jaxdist.config", ":x", ".config:x"):
        with pytest.raises(ConfigError, match=f"^{wrong!r}: .*; refer to an object that can be imported"):
            resolve(wrong)


class Bare(Decoder):
    family: Literal["bare"] = "bare"


def test_a_decoder_without_fields_of_its_own_fits_a_mesh() -> None:
    experiment = Experiment().model_copy(update={"model": Bare()})
    sizes = {name: size for name, size, *_ in Bare().mesh_sizes(experiment.parallel)}
    assert sizes == {"heads": 8, "kv_heads": 8, "hidden": 384, "vocab": 256, "dim": 128}
    experiment.check_mesh(experiment.parallel.axes() | {"fsdp": 2, "tensor": 4})
    with pytest.raises(ConfigError, match=r"model.heads = 8 cannot be divided over the mesh axis tensor = 3"):
        experiment.check_mesh(experiment.parallel.axes() | {"tensor": 3})


def test_an_error_of_any_kind_names_its_row_and_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no GPU today')")
    monkeypatch.syspath_prepend(tmp_path)
    sources: Registry[DataSource] = Registry("data source", DataSource)
    sources.register(DataSource("a", "broken_module:x"), Owner("one"))
    message = (
        "the data source 'a' of plugin 'one': open = 'broken_module:x': its import fails, RuntimeError: no GPU today "
        r"\(.*broken_module.py, line 1\)"
    )
    with pytest.raises(ConfigError, match=message):
        optional(sources, "a", "open")


def test_errors_and_results_of_a_plugins_code_name_its_row() -> None:
    rows: Registry[DataSource] = Registry("row", DataSource)
    rows.register(DataSource("a", lambda value: 6 // value), Owner("one"))
    rows.register(DataSource("b", lambda value: 6 // value), BUILT_IN)
    checked, ours = (function(rows, name, "open", "a test", int) for name in "ab")
    assert checked(2) == ours(2) == 3
    message = (
        r"^the row 'a' of plugin 'one': its open fails, ZeroDivisionError: .* \(.*registry_test.py, line \d+\); correct"
    )
    with pytest.raises(ConfigError, match=message):
        checked(0)
    with pytest.raises(
        ConfigError, match=r"^the row 'a' of plugin 'one': open returns 3.0; give an instance of .*int$"
    ):
        checked(2.0)
    with pytest.raises(ZeroDivisionError):  # our own mistakes keep their traceback
        ours(0)
    with pytest.raises(
        ConfigError, match=r"^the row 'a' of plugin 'one': open = <function .*; give an instance of .*int"
    ):
        optional(rows, "a", "open", int)


def test_other_objects_than_rows_are_refused() -> None:
    rows: Registry[Any] = Registry("row", DataSource)
    for wrong in (DataSource, "a", UpdateRule("a", {})):
        with pytest.raises(
            ConfigError, match=r"^one registers as row .*; give an instance of jaxdist.config.data.Data"
        ):
            rows.register(wrong, Owner("one"))
    for name in (3, ""):
        with pytest.raises(ConfigError, match=f"^one registers a row with name = {name!r}; give it a text as name"):
            rows.register(DataSource(cast(Any, name)), Owner("one"))
    for config in (Toy(family="toy"), DataSource):
        with pytest.raises(ConfigError, match=r"^family 'toy': config = .* is no class of model sections; derive one"):
            Family("toy", cast(Any, config), "nowhere:Toy")
    for piece, value in (("aliases", ("mine",)), ("zero_gradients", "bias"), ("zero_gradients", (1,))):
        with pytest.raises(ConfigError, match=rf"^family 'toy': {piece} = .*; give a (mapping|tuple) of "):
            Family("toy", Toy, "nowhere:Toy", **{piece: cast(Any, value)})
    for states in (["m"], {"m": "all"}):
        with pytest.raises(ConfigError, match=r"^optimizer 'a': states = .*'m'.*; give a mapping of their names"):
            UpdateRule("a", cast(Any, states))
    with pytest.raises(ConfigError, match=r"^optimizer 'a': states\['m'\] fails for a ParamRole, TypeError"):
        UpdateRule("a", {"m": cast(Any, lambda: True)})
    for state in ("ema", "a/b", "", 3):
        with pytest.raises(ConfigError, match=rf"^optimizer 'a': states\[{state!r}\]: give an identifier as name"):
            UpdateRule("a", {cast(Any, state): lambda role: True})


WRONG: Any = {
    "files = 'no'; give a value of the type bool": lambda: DataSource("a", files=cast(Any, "no")),
    "parameters = None; give a value of the type bool": lambda: Strategy("a", *cast(Any, (None, None, None))),
    "squares = 'm'; give a value of the type tuple[str, ...]": lambda: UpdateRule("a", {}, squares=cast(Any, "m")),
    "squares = (1,); give a value of the type tuple[str, ...]": lambda: UpdateRule("a", {}, squares=cast(Any, (1,))),
    "elementwise = ''; give a value of the type bool | None": lambda: UpdateRule("a", {}, elementwise=cast(Any, "")),
    "stateless = 3; give a value of the type Callable": lambda: UpdateRule("a", {}, stateless=cast(Any, 3)),
}


@pytest.mark.parametrize("message", WRONG)
def test_fields_of_other_types_are_refused(message: str) -> None:
    row = WRONG[message]()
    rows: Registry[Any] = Registry("row", type(row))
    with pytest.raises(ConfigError, match=f"^one registers the row 'a' with {re.escape(message)}"):
        rows.register(row, Owner("one"))


def test_fields_of_their_types_are_accepted() -> None:
    good = UpdateRule("a", {}, lambda *a: a, squares=("m",), elementwise=True), Strategy("a", True, True, True)
    for row in (*good, DataSource("a", "b:c", files=True), Family("toy", Toy, "nowhere:Toy", {"a": 1})):
        rows: Registry[Any] = Registry("row", type(row))
        rows.register(row, Owner("one"))
        assert [*rows] == [row.name]
