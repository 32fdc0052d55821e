"""The planner's command: plans that fit, changes that would help, recommendations, and refusals."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.config.hardware import FILE, hardware, peak_flops, read, shipped
from jaxdist.config.precision import Dtype
from jaxdist.plan import main
from jaxdist.planner.plans import Plan, flags, smallest_change
from jaxdist.planner.recommend import candidates, reasons, recommend
from jaxdist.runs.display import megabytes

pytestmark = pytest.mark.long

Capsys = pytest.CaptureFixture[str]


def planned(argv: Sequence[str], code: int = 0) -> None:
    """Run the command; it ends with 3 if nothing fits."""
    if not code:
        main(argv)
        return
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == code


def printed(capsys: Capsys, *argv: str, code: int = 0) -> dict[str, Any]:
    planned([*argv, "--json"], code)
    return json.loads(capsys.readouterr().out)


def test_one_object(capsys: Capsys) -> None:
    found = printed(
        capsys, "--config", "llama-3.1-8b", "--mesh", "16x8", "--hardware", "h200", "--train.accumulation", "1"
    )
    assert found["devices"] == 128 and found["mesh"]["tensor"] == 8 and found["fits"] and not found["smallest_change"]
    held = found["memory"]
    assert held["peak"] == pytest.approx(sum(v for k, v in held.items() if k not in ("peak", "host")))
    assert held["parameters"] == pytest.approx(8.03e9 * 4 / 128, rel=1e-3)
    seconds = found["time"]
    assert found["step_seconds"] == pytest.approx(sum(seconds.values()) - 2 * seconds["hidden"])
    assert found["tokens_per_second"] == pytest.approx(16 * 8192 / found["step_seconds"])


def test_tables(capsys: Capsys) -> None:
    main(["--config", "llama-1b", "--mesh", "4x2"])
    output = capsys.readouterr().out
    for text in ("optimizer state", "fsdp", "tensor", "matrix products", "tokens/s", "fits: "):
        assert text in output


def test_compiled_beside_the_closed_form(capsys: Capsys) -> None:
    """Parameters, optimizer state and traffic agree to the byte; the peak's form is for a GPU, the compiled one for a
    CPU."""
    found = printed(capsys, "--mesh", "2x4", "--compiled", "--hardware", "tpu-v5p")
    closed, compiled = found["memory"], found["compiled"]["memory"]
    assert [closed[kind] for kind in ("parameters", "optimizer_state")] == [
        compiled[kind] for kind in ("parameters", "optimizer_state")
    ]
    assert found["compiled"]["traffic"] == pytest.approx(found["least_bytes"], rel=1e-3)
    assert closed["peak"] == pytest.approx(compiled["peak"], rel=0.1)


def test_the_suggested_change_fits(capsys: Capsys) -> None:
    """The suggested change fits, and costs the least time of those that do."""
    argv = ["--config", "llama-3.1-8b", "--mesh", "8x1", "--train.accumulation", "1", "--train.batch", "24"]
    planned(argv, code=3)
    output = capsys.readouterr().out
    assert "does not fit: 95.25 GB of 95% of 80.00 GB" in output
    main([*argv, *output.strip().rpartition("makes it fit: ")[2].split()])
    assert "\nfits: " in capsys.readouterr().out
    output = run(capsys, "--config", "llama-3.1-405b", "--mesh", "1x1", code=3)
    assert "no single change makes it fit, see --recommend" in output


FULL_BATCH = ["--train.accumulation", "1", "--train.batch", "24"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "llama-3.1-70b", "--mesh", "8x1", "--train.batch", "8"],
        ["--config", "llama-3.1-8b", "--mesh", "8x1", "--strategy", "ddp", "--train.batch", "16"],
        [
            *["--config", "llama-3.1-8b", "--mesh", "8x1", "--memory.remat", "selective", "--memory.remat_every", "2"],
            *FULL_BATCH,
        ],
    ],
    ids=" ".join,
)
def test_a_change_followed_literally_fits(argv: list[str], capsys: Capsys) -> None:
    found = printed(capsys, *argv, code=3)
    assert not found["fits"]
    assert printed(capsys, *argv, *found["smallest_change"].split())["fits"]


def run(capsys: Capsys, *argv: str, code: int = 0) -> str:
    planned(argv, code)
    return capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("config", ["llama-3.1-8b", "mixtral-8x7b", "resnet-50"])
def test_all_causes_are_in_a_plan(config: str) -> None:
    plan = Plan(load(config, {"parallel.mesh": "8x1", "train.batch": 16}), hardware("h100"))
    f = plan.footprint
    assert plan.memory["peak"] == pytest.approx(f.parameters + f.optimizer_state + sum(f.peak.values()))


def test_images(capsys: Capsys) -> None:
    """Mesh, strategy and microbatches of a ResNet, by the same commands."""
    line = ["--config", "resnet-50", "--precision", "bf16", "--train.batch", "16384"]
    output = run(capsys, *line, "--mesh", "8x1", code=3)
    assert "images/s" in output and "does not fit" in output and "--train.accumulation 2" in output
    found = printed(capsys, *line, "--recommend", "--devices", "32")
    assert all(p["fits"] and p["mesh"]["tensor"] == 1 for p in found["plans"]) and len(found["plans"]) > 5


def test_other_meshes_need_other_devices() -> None:
    plan = Plan(load("llama-3.1-70b", {"parallel.mesh": "8x1", "train.batch": 8}), hardware("h100"))
    change = smallest_change(plan)
    assert not plan.fits and change and change.fits and change.devices > plan.devices


def test_recommend(capsys: Capsys) -> None:
    of = ["--config", "mistral-7b", "--train.batch", "64"]
    found = printed(capsys, *of, "--recommend", "--devices", "64", "--memory", "40GB", "--top", "5")
    plans = found["plans"]
    assert len(plans) == 5 and all(p["fits"] and p["devices"] == 64 for p in plans)
    assert [p["step_seconds"] for p in plans] == sorted(p["step_seconds"] for p in plans)
    assert any("ddp would not fit" in reason for reason in found["reasons"])
    assert "to train so, add to the command line: --mesh" in run(capsys, "--recommend", "--devices", "4")


def test_a_small_model_is_not_sharded() -> None:
    """Gradients once a step are less than parameters twice a microbatch."""
    best, *_ = recommend(load("gpt2", {"train.batch": 64, "train.accumulation": 4}), 8, hardware("h100"))
    assert best.experiment.parallel.strategy in ("ddp", "zero1") and best.mesh["tensor"] == 1
    assert any(re.search(r"fsdp would take \S+% longer", reason) for reason in reasons(best))


def test_tensor_stays_within_a_machine_and_sequences_are_split_where_long() -> None:
    device = hardware("h100")
    small = list(candidates(load("llama-3.1-8b", {"train.batch": 64}), 64, device))
    assert {p.mesh["tensor"] for p in small} == {1, 2, 4, 8} and {p.mesh["context"] for p in small} == {1}
    long = {"train.batch": 8, "data.sequence": 65536}
    assert {p.mesh["context"] for p in candidates(load("llama-3.1-8b", long), 64, device)} > {1, 2, 4}


def test_the_largest_on_16384_devices() -> None:
    """Found within a minute; the model is divided, as it needs 812 GB per device otherwise."""
    plans = recommend(load("llama-3.1-405b", {}), 16384, hardware("h100"))
    assert all(p.fits and p.devices == 16384 for p in plans) and plans[0].mesh["tensor"] == 8


@pytest.mark.parametrize("way", [["--mesh", "4x2"], ["--recommend", "--devices", "8"]], ids=" ".join)
def test_it_is_drawn(way: list[str], tmp_path: Path, capsys: Capsys) -> None:
    """One page without scripts or external references, with the JSON beside it."""
    pytest.importorskip("matplotlib")
    found = printed(capsys, "--config", "llama-1b", *way, "--output", str(tmp_path / "plan"))
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == found
    page = (tmp_path / "plan" / "plan.html").read_text()
    assert page.count("<svg") == 2 and "<script" not in page and "http" not in page.replace("http://www.w3.org/", "")
    for text in ("Memory of a device", "Scaling", "optimizer state", "zero1", "fsdp, tensor = 8", "MFU"):
        assert text in page


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hardware", "h10"], r"--hardware h10: neither a shipped device nor a .toml file; did you mean 'h100'"),
        (["--memory", "80"], r"--memory.*'80' is not a size; give it as 80GB"),
        (["--recommend"], r"--recommend and --devices N go together"),
        (["--devices", "8"], r"--recommend and --devices N go together"),
        (["--recommend", "--devices", "8", "--mesh", "2x4"], r"--recommend chooses the mesh"),
        (["--recommend", "--devices", "0"], r"'0' is not a whole number"),
        (["--recommend", "--devices", "7"], r"train.batch = 16 sequences cannot .* any mesh .*; use --train.batch 21"),
        (["--mesh", "3x1"], r"train.batch = 16 sequences cannot be divided over"),
        (["--hardware", "tpu-v5p", "--precision", "fp64"], r"tpu-v5p has no rate for it"),
        (["--config", "resnet-50", "--mesh", "4x2"], r"axis tensor = 2 with model.family = resnet"),
        (
            ["--config", "resnet-50", "--recommend", "--devices", "7"],
            r"train.batch = 256 images .*; use --train.batch 259",
        ),
        (["--recommend", "--devices", "512"], r"train.batch = 16 sequences cannot .*; use --train.batch \d+$"),
    ],
)
def test_bad_input(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_nothing_fits(capsys: Capsys) -> None:
    found = printed(capsys, "--recommend", "--devices", "8", "--memory", "1MB", code=3)
    assert not found["fits"] and not found["plans"] and "give more devices" in found["reasons"][0]


SPLIT = ["llama-3.1-70b", "--mesh", "fsdp=64,tensor=4"]  # its config splits sequences over tensor


@pytest.mark.parametrize(
    "argv",
    [
        SPLIT,
        ["llama-3.1-8b", "--mesh", "4x2", "--parallel.sequence", "true", "--train.batch", "8"],
        ["llama-1b", "--mesh", "data=2,fsdp=2,tensor=2"],
        ["mixtral-8x7b", "--mesh", "8x2", "--memory.remat", "full"],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_one_plan_has_one_answer(argv: list[str], tmp_path: Path, capsys: Capsys) -> None:
    """Page, table and JSON give the same bytes for a mesh as the command with that mesh."""
    pytest.importorskip("matplotlib")
    found = printed(capsys, "--config", *argv, "--output", str(tmp_path))
    page = re.sub(r"\s+", " ", (tmp_path / "plan.html").read_text())
    rows = re.findall(
        r'<th scope="row">(\S+)</th>.*?<td data-name="memory, GB">([\d.]+)(: does not fit)?</td></tr>', page
    )
    assert rows and float(rows[0][1]) == pytest.approx(found["memory"]["peak"] / 1e9, abs=0.05)
    for mesh, size, refused in rows:
        one = [*argv, "--mesh", mesh]
        code = 3 if refused else 0
        again = printed(capsys, "--config", *one, code=code)
        assert float(size) == pytest.approx(again["memory"]["peak"] / 1e9, abs=0.05) and again["fits"] != bool(refused)
        assert ("does not fit: " if refused else "fits: ") + megabytes(again["memory"]["peak"]) in run(
            capsys, "--config", *one, code=code
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel.sequence": True},
        {"memory.remat": "full", "memory.remat_every": 2},
        {"parallel.reshard_after_forward": False},
    ],
    ids=str,
)
def test_a_recommended_command_is_the_recommended_plan(fields: dict[str, Any], capsys: Capsys) -> None:
    """Holds for configs that split sequences, rematerialize every other block, or keep gathered weights."""
    line = ["--config", "llama-1b", *(text for name, value in fields.items() for text in (f"--{name}", str(value)))]
    loaded = load("llama-1b", fields)
    best, *_ = recommend(loaded, 8, hardware("h100"))
    again = printed(capsys, *line, *flags(best.experiment, loaded).split())
    assert (again["step_seconds"], again["memory"]) == (best.time.step, best.memory)


def test_a_custom_device(tmp_path: Path, capsys: Capsys) -> None:
    lines = FILE.read_text().partition("[h100]\n")[2].partition("\n[")[0]
    file = tmp_path / "own.toml"
    file.write_text("[half]\n" + lines.replace("memory = 80e9", "memory = 40e9"))
    assert printed(capsys, "--config", "llama-1b", "--mesh", "8x1", "--hardware", str(file))["hardware"] == "half"
    file.write_text("[half]\n" + lines.replace("memory = 80e9", "memory = -1"))
    with pytest.raises(ConfigError, match=r"own.toml: half.memory = -1: .*give each device what"):
        read(file)
    file.write_text("[half]\n" + lines.replace("memory = 80e9", ""))
    with pytest.raises(ConfigError, match=r"half.memory"):
        read(file)
    file.write_text("half = 3")
    with pytest.raises(ConfigError, match=r"own.toml: half = 3"):
        read(file)
    with pytest.raises(ConfigError, match=r"has 8 devices; give a file with one table"):
        hardware(str(FILE))


def test_devices_are_known_by_the_names_of_their_drivers() -> None:
    bf16: Dtype = "bfloat16"
    assert peak_flops("NVIDIA H100 80GB HBM3", bf16) == 989e12 and peak_flops("TPU v5 lite", bf16) == 197e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert peak_flops("TPU v5", bf16) == 459e12 and peak_flops("TPU v5", "float64") is peak_flops("cpu", bf16) is None
    assert {d.name for d in shipped().values()} >= {"a100", "h100", "h200", "b200", "tpu-v5p", "tpu-v6e"}
