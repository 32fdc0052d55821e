"""Pages of the planner and the benchmark as a browser draws them."""

import json
from pathlib import Path

import pytest

from jaxdist import plan
from jaxdist.bench import __main__ as bench
from jaxdist.bench.bench_test import EARLIER, every
from jaxdist.bench.figures import Section, to_json
from parity_tests.report.report_test import WIDTHS, seen

pytestmark = pytest.mark.long

LINES = (
    ["llama-3.1-8b", "--mesh", "4x2", "--train.batch", "8"],
    ["llama-1b", "--mesh", "data=2,fsdp=2,tensor=2", "--memory.remat", "full"],
)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_the_page_of_a_plan_fits_at_any_width(line: list[str], tmp_path: Path) -> None:
    plan.main(["--config", *line, "--output", str(tmp_path / "plan")])
    page = (tmp_path / "plan" / "plan.html").read_text(encoding="utf-8")
    assert seen(page, tmp_path) == ["2 figures"] * len(WIDTHS)


def test_the_page_of_a_bench_fits_at_any_width(tmp_path: Path) -> None:
    sections = {name: Section(every(name), EARLIER, ("a note",)) for name in bench.SECTIONS}
    (file := tmp_path / "bench.json").write_text(json.dumps(to_json(sections)), encoding="utf-8")
    bench.main(["--results", str(file), "--output", str(tmp_path / "out"), "--compare", str(file)])
    page = (tmp_path / "out" / "bench.html").read_text(encoding="utf-8")
    assert seen(page, tmp_path) == [f"{len(bench.SECTIONS) + 1} figures"] * len(WIDTHS)
