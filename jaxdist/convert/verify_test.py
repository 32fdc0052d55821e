"""A source that changed since it was written, and the result of converting it."""

import importlib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment, TrainingError
from jaxdist.conftest import often
from jaxdist.convert import verify
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Content
from jaxdist.convert.convert_test import MODELS, SMALL
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.families.llama.config import Llama
from jaxdist.families.llama.huggingface import TABLES
from jaxdist.formats.sources import located
from jaxdist.formats.tables import HUGGINGFACE, Table
from jaxdist.runs import checkpoints
from jaxdist.training.loss_scale import state_of

pytestmark = pytest.mark.long

dcp_files = importlib.import_module("jaxdist.convert.kinds.dcp_files")


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with one changed data file; all such files count as large."""
    monkeypatch.setattr(checkpoints, "SMALL", 200)
    run = written(tmp_path / "run", "orbax", content_of(Llama(**SMALL)))
    flip(run / "checkpoints" / "7" / "parameters" / "embed.embedding" / "0.0")
    return run


def flip(file: Path) -> None:
    numbers = bytearray(file.read_bytes())
    numbers[9] ^= 1
    file.write_bytes(numbers)


def largest(folder: Path) -> Path:
    """Largest of the data files."""
    return max([*folder.rglob("*.0"), *folder.rglob("*.distcp")], key=lambda file: file.stat().st_size)


class TestRunWhoseNewestChanged:
    """An older checkpoint, of step 5, is intact."""

    @pytest.fixture(params=often(["orbax", "dcp"], ["dcp"]))
    def run(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(checkpoints, "SMALL", 200)
        content = content_of(Llama(**SMALL))
        run, other = written(tmp_path / "run", request.param, content), tmp_path / "other"
        written(other, request.param, replace(content, step=5, updates=5))
        (other / "checkpoints" / "5").rename(run / "checkpoints" / "5")
        flip(largest(run / "checkpoints" / "7"))
        return run

    def test_is_converted_from_the_one_before(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([str(run), str(tmp_path / "target"), "--to", "dcp", "--verify"])
        assert [path.name for path in (tmp_path / "target" / "checkpoints").iterdir()] == ["5"]
        assert re.search(r"7 is damaged: its file \S+ has changed .*; going back to step 5", capsys.readouterr().out)
        with pytest.raises(ConfigError, match="7 is damaged"):
            main([str(run / "checkpoints" / "7"), str(tmp_path / "b"), "--to", "dcp"])

    def test_is_listed_in_one_json_object(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The newest one's damage is reported on standard error."""
        flip(run / "checkpoints" / "7" / checkpoints.MANIFEST)
        main(["--inspect", str(run), "--json"])
        captured = capsys.readouterr()
        assert json.loads(captured.out)["source"] == str(run)
        assert "going back to step 5" in captured.err

    def test_is_evaluated_by_the_one_before(self, run: Path) -> None:
        assert located(run) == run / "checkpoints" / "5"

    def test_is_not_blamed_for_its_target(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The written target is damaged before it is read back: another source would not help."""
        right, tries = dcp_files.write, list[Path]()

        def spoiled(path: Path, conversion: Any) -> None:
            tries.append(path)
            right(path, conversion)
            flip(largest(path))

        monkeypatch.setattr(dcp_files, "write", spoiled)
        with pytest.raises(ConfigError, match=r"partial/checkpoints/5 is damaged"):
            main([str(run / "checkpoints" / "5"), str(tmp_path / "b"), "--to", "dcp", "--verify"])
        assert len(tries) == 1


def test_a_loss_scale_that_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The initial scale is read in its place."""
    content = content_of(Llama(**SMALL))
    values = content.experiment.model_dump(exclude_none=True) | {"precision": {"policy": "fp16"}}
    experiment = Experiment.parse(values, source="test")
    source = written(tmp_path / "run", "orbax", replace(content, experiment=experiment, scaling=state_of(8.0, 3)))
    line, right = [str(source), str(tmp_path / "target"), "--to", "dcp", "--verify"], dcp_files.write
    main(line)

    def forgetful(path: Path, conversion: Any) -> None:
        right(path, replace(conversion, content=replace(conversion.content, scaling=None)))

    monkeypatch.setattr(dcp_files, "write", forgetful)
    with pytest.raises(TrainingError, match=r"loss scale \(8.0, 3.0\) was .* read again as \(65536.0, 0.0\)"):
        main([*line, "--force"])


def swapped(a: str, b: str) -> Table:
    """Planted: two names of Llama's table are swapped, in both directions of a conversion."""
    table, marked = TABLES[HUGGINGFACE], "|"
    rows = [
        row._replace(theirs=row.theirs.replace(f".{a}.", marked).replace(f".{b}.", f".{a}.").replace(marked, f".{b}."))
        for row in table.rows
    ]
    return table._replace(rows=rows)


SWAPS = [("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("input_layernorm", "post_attention_layernorm")]
TABLES_MISTAKEN = [
    pytest.param(kind, swap, marks=[pytest.mark.slow] * ((kind, swap) != ("dcp", SWAPS[1])))
    for kind in ("orbax", "dcp")
    for swap in SWAPS
]
BY_US = "of SOURCE by jaxdist and of TARGET by jaxdist, are equal to the bit"
UNVERIFIED = "not verified: which tensor of {} is which; jaxdist reads it by the table of the conversion"


class TestLogits:
    """Logits of Hugging Face folders, computed by transformers."""

    @pytest.fixture(autouse=True)
    def transformers(self) -> Any:
        pytest.importorskip("torch")
        return pytest.importorskip("transformers")

    @pytest.fixture
    def hf(self, tmp_path: Path) -> Path:
        return written(tmp_path / "hf", "hf", content_of(MODELS["Qwen3ForCausalLM biases window"]))

    @pytest.mark.parametrize(("kind", "swap"), TABLES_MISTAKEN)
    def test_verify_finds_a_mistake_in_a_table(
        self, kind: str, swap: tuple[str, str], hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A round trip with the same mistake would hide it."""
        main([str(hf), str(tmp_path / "run"), "--to", kind, "--verify"])
        main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf", "--verify"])
        monkeypatch.setitem(TABLES, HUGGINGFACE, swapped(*swap))
        message = "logits of SOURCE by {} and of TARGET by {} differ by .* more than 8.7e-06; nothing is kept"
        with pytest.raises(TrainingError, match=message.format("transformers", "jaxdist")):
            main([str(hf), str(tmp_path / "a"), "--to", kind, "--verify"])
        with pytest.raises(TrainingError, match=message.format("jaxdist", "transformers")):
            main([str(tmp_path / "run"), str(tmp_path / "b"), "--to", "hf", "--verify"])
        with pytest.raises(TrainingError, match=message.format("transformers", "jaxdist").replace("8.7e-06", "0.05")):
            main([str(hf), str(tmp_path / "c"), "--to", kind, "--verify", "--dtype", "bfloat16"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "run"]

    def test_without_transformers_the_table_is_reported_as_unchecked(
        self, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        main([str(hf), str(tmp_path / "a"), "--verify"])
        output = capsys.readouterr().out
        assert "of SOURCE by transformers and of TARGET by jaxdist, are within" in output
        assert "where 8.7e-06 is what rounding may do" in output and "not verified" not in output
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.delitem(sys.modules, "jaxdist.convert.hf_reference")
        monkeypatch.setitem(TABLES, HUGGINGFACE, swapped(*SWAPS[0]))
        main([str(hf), str(tmp_path / "b"), "--verify"])
        output = capsys.readouterr().out
        assert BY_US in output and UNVERIFIED.format("SOURCE") in output

    def test_with_a_transformers_that_is_broken(
        self, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: str) -> Any:
            raise ImportError("cannot import name 'x' from 'tokenizers'")

        monkeypatch.setattr(verify, "import_module", broken)
        main([str(hf), str(tmp_path / "b"), "--verify"])
        output = capsys.readouterr().out
        assert "transformers cannot be imported: cannot import name 'x'" in output and BY_US in output

    @pytest.mark.parametrize("target", often(["b.pt", "dcp"], ["dcp"]))
    def test_for_other_kinds_the_table_is_reported_as_unchecked(
        self, target: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([str(hf), str(tmp_path / "run")])
        kind = target.removeprefix("b.pt") or "torch"
        capsys.readouterr()
        main([str(tmp_path / "run"), str(tmp_path / target), "--to", kind, "--verify"])
        output = capsys.readouterr().out
        assert BY_US in output and UNVERIFIED.format("TARGET") in output and UNVERIFIED.format("SOURCE") not in output

    @pytest.mark.parametrize("source", often(["hf", "orbax"], ["orbax"]))
    def test_other_logits_in_another_dtype_are_found(
        self, source: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Negated logits: as far apart as possible at the same norm."""
        right, calls = verify.logits, list[Content]()
        line = [str(hf), str(tmp_path / "a"), "--verify"]
        if source == "orbax":
            main([str(hf), str(tmp_path / "run")])
            line = [str(tmp_path / "run"), str(tmp_path / "a"), "--to", "dcp", "--verify"]

        def negated(content: Content, inputs: Any) -> Any:
            calls.append(content)
            return right(content, inputs) * (-1 if source == "hf" or len(calls) == 2 else 1)

        monkeypatch.setattr(verify, "logits", negated)
        for dtype, most in (("bfloat16", 0.05), ("float16", 0.0063), ("float64", 8.7e-6)):
            calls.clear()
            with pytest.raises(TrainingError, match=rf"differ by 2 of their norm, more than {most:.2g}; nothing"):
                main([*line, "--dtype", dtype])

    @pytest.mark.parametrize("name", often(["MixtralForCausalLM", "Qwen3ForCausalLM"], ["MixtralForCausalLM"]))
    def test_a_router_may_send_less_than_half_of_the_tokens_elsewhere(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Accepted for rounded weights and a router, over 24 tokens."""
        hf, right = written(tmp_path / "hf", "hf", content_of(MODELS[name])), verify.logits
        sign = np.ones((2, 12, 1), np.float32)
        monkeypatch.setattr(verify, "logits", lambda content, inputs: right(content, inputs) * sign)

        def converted(tokens: int, *options: str) -> str:
            """Output of a conversion in which `tokens` tokens have other logits."""
            sign[...] = 1
            sign.reshape(-1)[:tokens] = -1
            main([str(hf), str(tmp_path / f"{tokens}{len(options)}"), "--verify", *options])
            return capsys.readouterr().out

        routed = name == "MixtralForCausalLM"
        assert "their norm, at half of the tokens, where" in converted(11 * routed, "--dtype", "float64") or not routed
        for tokens, options in ((13 if routed else 1, ("--dtype", "float64")), (1, ())):
            with pytest.raises(TrainingError, match=r"of their norm.* more than 8.7e-06"):
                converted(tokens, *options)

    def test_a_folder_that_transformers_does_not_take(
        self, hf: Path, tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = transformers.AutoModelForCausalLM.from_pretrained

        def missing(*arguments: Any, **how: Any) -> Any:
            model, report = right(*arguments, **how)
            return model, {**report, "missing_keys": ["model.norm.weight"]}

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
        with pytest.raises(TrainingError, match=r"cannot compute the logits of \S+hf: .*missing_keys .*model.norm.wei"):
            main([str(hf), str(tmp_path / "a"), "--verify"])
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_distance_that_is_not_finite() -> None:
    nan, one = np.array([np.nan, 1.0]), np.ones(2)
    assert verify.apart(nan, nan) == verify.apart(one * 0, one * 0) == 0
    assert verify.apart(nan, one) == verify.apart(one, one * np.inf) == verify.apart(one * 0, one) == np.inf
    assert verify.apart(one, -one) == 2
    rows, some = np.ones((5, 3)), np.array([1, -1, 1, -1, 1])[:, None]
    assert verify.apart(rows, rows * some, each=True) == 0 < verify.apart(rows, rows * some)
    assert verify.apart(rows, -rows * some, each=True) == 2


class TestSourceThatChanged:
    """A source is checked against its manifest while it is converted; the result of a changed one is dropped."""

    def test_is_refused(self, damaged: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"checkpoint .*7 is damaged: its file parameters/embed\S+ has changed"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])
        assert not (tmp_path / "target").exists()

    def test_explains_other_errors(self, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def confused(*_: Any) -> None:
            raise ConfigError("numbers as no others")

        monkeypatch.setattr(dcp_files, "write", confused)
        with pytest.raises(ConfigError, match="is damaged"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])

    def test_is_not_awaited_when_the_target_cannot_be_written(
        self, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: Any) -> None:
            raise ConfigError("its layers are of two dtypes")

        monkeypatch.setattr(dcp_files, "check", refused)
        with pytest.raises(ConfigError, match="two dtypes"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])

    def test_is_listed(self, damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Listing names reads no numbers."""
        main(["--inspect", str(damaged)])
        assert "embed.embedding" in capsys.readouterr().out

    def test_its_small_files_are_compared_before(self, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        KINDS["orbax"].format.read_content(damaged)
        monkeypatch.setattr(checkpoints, "SMALL", 1_000_000)
        with pytest.raises(ConfigError, match="is damaged"):
            KINDS["orbax"].format.read_content(damaged)

    def test_is_not_waited_for_by_a_full_disk(
        self, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right, waited = checkpoints.checksum, list[Path]()

        def slow(file: Path, kind: str, ended: Callable[[], bool]) -> str:
            until = time.monotonic() + 5
            while ended is not checkpoints.never and not ended() and not waited:
                time.sleep(0.01)
                if time.monotonic() > until:
                    waited.append(file)
            return right(file, kind)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoints, "checksum", slow)
        monkeypatch.setattr(dcp_files, "write", full)
        with pytest.raises(TrainingError, match="No space left on device"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])
        assert not waited

    def test_a_signal_waits_for_no_further_file(self, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, right = list[Path](), checkpoints.checksum

        def slow(file: Path, kind: str, _: Callable[[], bool]) -> str:
            begun.append(file)
            time.sleep(0.2)
            return right(file, kind)

        monkeypatch.setattr(checkpoints, "checksum", slow)
        with (
            pytest.raises(KeyboardInterrupt),
            verify.comparing(damaged / "checkpoints" / "7") as wait,
            verify.unchanged(wait),
        ):
            raise KeyboardInterrupt
        assert len(begun) < len(list(damaged.rglob("*.0"))) / 2
