"""The report agrees with verdict and runs, whatever is missing, and a browser draws all of it."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.expected.memory_causes import UNEXPLAINED, Cause
from parity_tests.proof.causes import Diagnosis
from parity_tests.proof.verdict import Check, Verdict
from parity_tests.report import figures, report

pytestmark = pytest.mark.long

WHY = "float64: both sides round alike to 1e-15"
LONG = "exp_avg_sq/layers.11.attention.k_proj.weight, torch_ref on the mesh and on one device"
HOLDS = [Check(level, LONG, 1e-15, 1e-10, WHY) for level in ("mathematics", "distribution", "precision", "traffic")]
FAILS = Check("memory", "parameters <b>, equal bytes on both sides", 2.28e7, 92.0, "rows & columns")
FIGURES = ("Loss per step", "Gradient norm per step", "Heat map", "Memory on the fullest device")


@dataclass
class Stub:
    """A run made of attributes alone."""

    side: str
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    records: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    states: Mapping[str, np.ndarray] = field(default_factory=dict)

    def kept_states(self, kind: str) -> Mapping[str, np.ndarray]:
        return {name: state for name, state in self.states.items() if name.startswith(f"{kind}/")}


def run(side: str, steps: int = 6, noise: float = 1e-8, layers: int = 12) -> Stub:
    """A run that differs from its twin by `noise`."""
    off = 1 + noise * (side == "torch_ref")
    metrics = [
        {"step": s, "loss": 5.0 / s * off, "grad_norm": 2.0 / s * off, "learning_rate": 1e-3}
        for s in range(1, 1 + steps)
    ]
    names = [
        "embed",
        *(f"layers.{i}.{part}" for i in range(layers) for part in ("q_proj", "up_proj")),
        "norm",
        "lm_head",
    ]
    collectives = [
        {"op": op, "axis": axis, "dtype": "float32", "count": 2, "bytes": float(size)}
        for op, axis, size in (
            ("all_gather", "fsdp", 2**20), ("all_reduce", "data+fsdp", 3 * 2**20), ("all_reduce", "fsdp+tensor", 6)
        )
    ]  # fmt: skip
    memory = {"parameters": 10_000, "gradients": 10_000, "optimizer_state": 20_072, "temporary": 2**20, "peak": 2**21}
    summary = {"versions": {side: "1.2"}, "devices": 4, "mesh": {"data": 2, "fsdp": 2}, "memory": memory}
    least = {"least_bytes": {"fsdp": 2.0**20, "data": 2.0**21}} if side == "jaxdist" else {}
    records = {step: {f"gradient/{name}.weight": np.full((2, 3), off) for name in names} for step in (1, 4)}
    return Stub(side, metrics, summary | least | {"collectives": collectives}, records)


def pair(**options: Any) -> tuple[Stub, Stub]:
    return run("jaxdist", **options), run("torch_ref", **options)


def written(
    folder: Path, verdict: Verdict, pairs: Mapping[str, tuple[Stub, Stub]], bounds: Mapping[int, float] | None = None
) -> str:
    file = folder / "report.html"
    report.write(file, verdict, pairs, {"config": "default & more"}, bounds or {})
    return file.read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """The text that a reader sees and a screen reader speaks."""
    labels = " ".join(re.findall(r'aria-label="([^"]*)"', page)) + " "
    shown = re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)
    return html.unescape(" ".join((labels + re.sub(r"<[^>]*>", " ", re.sub("<wbr>|</?span>", "", shown))).split()))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = {"one": pair(noise=1e-15), "mesh": pair(noise=3e-9), "policy": pair(noise=1e-8)}
    return written(tmp_path_factory.mktemp("whole"), Verdict([*HOLDS, FAILS]), pairs)


def test_everything_is_reported(complete: str) -> None:
    text = text_of(complete)
    verdict = Verdict([*HOLDS, FAILS])
    assert verdict.sentence.partition(": ")[2] in text and "<strong>Not equivalent</strong>" in complete
    numbers = (
        "22,800,000 92 ✗ no",
        "data jaxdist 3.00 2.00 1.500 torch_ref 3.00 2.00 1.500",
        "all_gather float32 2 1,048,576",
    )
    for phrase in (*numbers, *FIGURES, LONG, FAILS.name, FAILS.why, "✗ 1 of 1 fails", "default & more"):
        assert phrase in text, phrase
    assert complete.count("<svg") == 5


def test_layers_are_in_the_order_of_the_model(complete: str) -> None:
    heat = complete[complete.index("Heat map") :]
    assert re.findall(r">(embed|layers\.\d+|norm|lm_head)</text>", heat[: heat.index("</svg>")]) == [
        "embed", *(f"layers.{i}" for i in range(12)), "norm", "lm_head",
    ]  # fmt: skip


def test_it_is_self_contained(complete: str) -> None:
    """No scripts, no external references, and no duplicate id among the five figures."""
    outside = re.sub(r' xmlns(:\w+)?="[^"]*"', "", complete)
    assert not re.search(r"https?://|<script|<link|<iframe|@import|src=|\son\w+=", outside)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', outside))
    ids = re.findall(r'\sid="([^"]*)"', complete)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'href="#([^"]*)"', complete), *re.findall(r"url\(#([^)]*)\)", complete)} <= set(ids)


def test_it_is_the_same_each_time(tmp_path: Path) -> None:
    pages = [written(tmp_path, Verdict(HOLDS), {"policy": pair(), "one": pair()}) for _ in range(2)]
    assert pages[0] == pages[1]


def test_values_that_are_not_finite_are_named_gaps(tmp_path: Path) -> None:
    policy, one = pair(), pair(noise=1e-15)
    policy[1].metrics[2]["loss"] = float("nan")
    policy[1].metrics[4]["grad_norm"] = float("inf")
    del policy[0].metrics[3]["grad_norm"]
    bad = {**one[1].records[4], "gradient/norm.weight": np.full((2, 3), np.nan)}
    one[1].records = {**one[1].records, 4: bad, 9: bad}
    text = text_of(written(tmp_path, Verdict(HOLDS), {"one": one, "mesh": pair(noise=3e-9), "policy": policy}))
    for phrase in (
        "torch_ref has no finite number at step 3 (NaN)", "Not within the bound at steps 3, 4, 5 and 6",
        "torch_ref has no finite number at step 5 (∞)", "jaxdist has no finite number at step 4 (NaN)",
        "Closest to its bound: ∞ in norm at step 4, where", "Recorded on one side alone: step 9",
    ):  # fmt: skip
        assert phrase in text, phrase


def test_layers_are_red_beyond_the_bound_of_their_step(tmp_path: Path) -> None:
    def red(bounds: Mapping[int, float]) -> int:
        pairs = {"one": pair(noise=1e-9), "policy": pair()}
        page = written(tmp_path, Verdict(HOLDS), pairs, bounds)
        heat = page[page.index("Heat map") :]
        return heat[: heat.index("</svg>")].count(figures.BEYOND)

    none, first, both = red({1: 2e-9, 4: 2e-9}), red({4: 2e-9}), red({})
    assert none < first < both
    text = text_of(written(tmp_path, Verdict(HOLDS), {"one": pair(noise=1e-9), "policy": pair()}, {4: 2e-9}))
    assert "in embed at step 1, where" in text and "beyond its step's bound" in text


def test_runs_of_unequal_length(tmp_path: Path) -> None:
    text = text_of(written(tmp_path, Verdict(HOLDS), {"policy": (run("jaxdist"), run("torch_ref", steps=4))}))
    assert "unequal length (jaxdist 6, torch_ref 4 steps): the difference covers the 4 that all have" in text
    text = text_of(written(tmp_path, Verdict(HOLDS), {"policy": (run("jaxdist"), run("torch_ref", steps=0))}))
    assert "There is no step at which both runs have a number" in text


def test_missing_pieces_are_reported_as_missing(tmp_path: Path) -> None:
    other = Stub("transformers", run("torch_ref").metrics, {})
    text = text_of(written(tmp_path, Verdict(HOLDS), {"policy": (run("jaxdist"), other), "one": (other, other)}))
    for phrase in ("no float64 runs of both sides to derive it from", "transformers: memory not reported",
                 "Collectives of transformers Not reported", "No gradients were recorded on both sides"):  # fmt: skip
        assert phrase in text, phrase
    undecided = Verdict([], open={"precision": "no float64 run"})
    text = text_of(written(tmp_path, undecided, {}))
    for phrase in (undecided.sentence, "Not decided: precision", "There are no runs to draw", "? not checked"):
        assert phrase in text, phrase


def test_runs_of_the_policy_alone_have_a_heat_map_for_the_eye(tmp_path: Path) -> None:
    """Another loop's float32 run without a float64 one is such a run."""
    page = written(tmp_path, Verdict(HOLDS), {"policy": pair()}, {1: 2e-8, 4: 5e-9})
    assert "in embed at step 4, where 5e-09 is allowed" in text_of(page) and "The colours are only a guide" in page
    assert page.count("Heat map") == 1


def test_the_allocator_is_shown_where_it_matters(tmp_path: Path) -> None:
    runs = pair()
    assert "allocator" not in written(tmp_path, Verdict(HOLDS), {"policy": runs})
    runs[0].summary["memory"]["allocator_peak"] = 3 * 2**21
    text = text_of(written(tmp_path, Verdict(HOLDS), {"policy": runs}))
    assert "allocator peak 6.00 and not reported" in text and "shown with that of its allocator" in text


def test_memory_on_the_host_is_shown_if_there_is_any(tmp_path: Path) -> None:
    runs = pair()
    assert "host memory" not in written(tmp_path, Verdict(HOLDS), {"policy": runs})
    for side in runs:
        side.summary["memory"]["host"] = 3 * 2**20
    text = text_of(written(tmp_path, Verdict(HOLDS), {"policy": runs}))
    assert "host 3.00 and 3.00" in text and "in host memory" in text


def test_one_device_has_one_heat_map_and_no_traffic(tmp_path: Path) -> None:
    runs = pair()
    for side in runs:
        side.summary |= {"collectives": [], "least_bytes": {}}
    page = written(tmp_path, Verdict(HOLDS), dict.fromkeys(("one", "mesh", "policy"), runs))
    assert page.count("Heat map") == 1 and "On this mesh nothing must be sent" in page


# The page in frames as wide as a desktop, a tablet and a phone, as a browser's window cannot be that narrow.
WIDTHS = (1440, 768, 390)
MEASURE = """<script>
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const width = frame.contentWindow.innerWidth, page = frame.contentDocument;
  if (page.documentElement.scrollWidth > width) found.push(`scrolls sideways at ${width}`);
  for (const e of page.querySelectorAll("body *:not(svg *)")) {
    const name = `${width}: ${e.tagName} ${e.className}`;
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) found.push(`runs over at ${name}`);
    if (e.getBoundingClientRect().right > width + 1) found.push(`cut at ${name}`);
  }
  for (const text of page.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect(), svg = text.closest("svg").getBoundingClientRect();
    if (box.left < svg.left - 1 || box.right > svg.right + 1) found.push(`runs over at ${width}: ${text.textContent}`);
  }
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), range = page.createRange();
  while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/[A-Za-z]{2,20}(?![A-Za-z])/g)) {
    if (walker.currentNode.data.slice(0, word.index).match(/[A-Za-z]$/)) continue;
    range.setStart(walker.currentNode, word.index); range.setEnd(walker.currentNode, word.index + word[0].length);
    if (range.getClientRects().length > 1) found.push(`breaks at ${width}: ${word[0]}`);
  }
  for (const svg of page.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
    if (!(box.width * box.height && drawn.width * drawn.height)) found.push(`nothing drawn at ${width}: ${svg.id}`);
  }
  found.push(`${page.querySelectorAll("svg").length} figures`);
}
document.body.dataset.found = JSON.stringify(found);
</script>"""
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
)  # fmt: skip


def browse(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a headless browser; skips the test without one."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser: the report is not opened; `apt-get install chromium` brings one")
    line = [browser, *QUIET, f"--user-data-dir={page.parent / 'profile'}", *arguments, page.as_uri()]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)


def seen(page: str, folder: Path) -> list[str]:
    """Findings of the browser: number of figures at each width, layout errors, console messages."""
    frame = '<iframe width="{}" height="900" srcdoc="{}"></iframe>'
    frames = "".join(frame.format(width, html.escape(page)) for width in WIDTHS)
    onload = MEASURE.replace("<script>", "<script>addEventListener('load', () => {").replace("</script>", "})</script>")
    (folder / "frames.html").write_text(f"<!doctype html><meta charset=utf-8>{onload}<body>{frames}", encoding="utf-8")
    done = browse(folder / "frames.html", "--dump-dom")
    measured = re.search(r'data-found="([^"]*)"', done.stdout)
    assert measured, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return [*json.loads(html.unescape(measured[1])), *console]


def test_a_browser_draws_everything_at_any_width(complete: str, tmp_path: Path) -> None:
    assert seen(complete, tmp_path) == ["5 figures"] * len(WIDTHS)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("tokens per second", "tokens| per| second"),
        ("exp_avg/layers.0.q_proj.weight", "exp_|avg/|layers.|0.|q_|proj.|weight"),
        ("../a  b/" + "x" * 20, ".|.|/|a|  b/|" + "x" * 16 + "|xxxx"),
    ],
)
def test_a_name_breaks_between_its_parts_alone(name: str, broken: str) -> None:
    assert str(report.breakable(name)).split("<wbr>") == broken.split("|")


def test_where_it_differs_is_reported_where_no_gradients_were_kept(tmp_path: Path) -> None:
    """Another loop's report has the cause, the first check of each level, and a heat map of the final states."""
    runs = pair()
    for number, side in enumerate(runs):
        side.records, off = {}, 1 + 1e-6 * number
        side.states = {f"{kind}/embed.weight": np.full(3, off) for kind in ("weights", "exp_avg")}
    cause = Diagnosis("clip", 1, "the gradients that the optimizer of theirs gets are 2 times ours", "exp_avg")
    page = written(tmp_path, Verdict([*HOLDS, FAILS], cause=cause), {"policy": runs})
    text = text_of(page)[text_of(page).index("Where it differs") :]
    memory = f"Memory: {FAILS.title}: 22,800,000, where 92 is allowed"
    for phrase in (f"Cause: {cause}", memory, "Final states by layer", "The largest: 1.0e-06 in weights of embed"):
        assert phrase in text, phrase
    assert seen(page, tmp_path) == ["4 figures"] * len(WIDTHS)
    for side in runs:
        side.states = {}
    assert f"Cause: {cause}" in text_of(written(tmp_path, Verdict([FAILS], cause=cause), {"policy": runs}))
    assert "Cause" not in text_of(written(tmp_path, Verdict(HOLDS), {"policy": runs}))


def test_it_prints_on_few_pages(complete: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(complete, encoding="utf-8")
    browse(tmp_path / "report.html", "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'report.pdf'}")
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 8


def test_long_names_do_not_widen_the_page(tmp_path: Path) -> None:
    runs = pair()
    runs[1].side = "/home/someone/$experiments$/" + "x" * 90
    page = written(tmp_path, Verdict([replace(FAILS, name="y" * 90)]), {"one": runs, "policy": runs})
    assert seen(page, tmp_path) == ["4 figures"] * len(WIDTHS)


def test_the_browser_finds_broken_figures(tmp_path: Path) -> None:
    broken = """<!doctype html><svg id="empty" viewBox="0 0 9 9"></svg><svg id="bad" viewBox="0 0 9 9">
        <path d="M 0 q"/></svg><script>missing()</script><style>svg {width: 9px}</style><p style="width: 800px">wide"""
    found = "\n".join(seen(broken, tmp_path))
    for what in ("scrolls sideways at 390", "nothing drawn at 390: empty", "nothing drawn at 1440: bad",
                 "attribute d: Expected number", "missing is not defined"):  # fmt: skip
        assert what in found, found
    assert "sideways at 1440" not in found


def test_the_browser_finds_overflowing_and_broken_text(tmp_path: Path) -> None:
    broken = """<!doctype html><body><div style="width: 60px; white-space: nowrap">one two three four five</div>
        <div style="width: 30px; overflow-wrap: anywhere">certainly</div>
        <svg width="50" height="9"><text y="9">a name that is longer than its figure</text></svg>"""
    found = "\n".join(seen(broken, tmp_path))
    for what in ("runs over at 768: DIV", "breaks at 390: certainly", "runs over at 1440: a name that is longer"):
        assert what in found, found
    assert "breaks at 390: one" not in found


def test_the_causes_of_memory_sum_up(tmp_path: Path) -> None:
    """Shows named causes, their sum, the measurement and the rest, also where the closed form is too high."""
    causes = [Cause("kept & small", 2**20, 0.0), Cause("kept", 2**21, 2**22), Cause(UNEXPLAINED, -(2**20), 2**20)]
    page = text_of(written(tmp_path, Verdict(HOLDS, memory=causes), {"policy": pair()}))
    assert "kept 2.00 4.00 kept & small 1.00 – closed form 3.00 4.00 measured 2.00 5.00 unexplained −1.00 1.00" in page
    assert "closed form 3.00" not in text_of(written(tmp_path, Verdict(HOLDS), {"policy": pair()}))
