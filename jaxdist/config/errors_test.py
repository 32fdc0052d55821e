"""Messages and exit codes at the end of a process."""

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import Experiment
from jaxdist.config.errors import ConfigError, TrainingError, check_validation, writes_to
from jaxdist.config.exits import exit_codes
from jaxdist.runs.display import say


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Unprintable characters are escaped in lines and errors; all others stay."""
    name = "\x1b[2J größe 重み \udc80\r"

    def fail() -> None:
        raise ConfigError(f"{name}: one\ntwo")

    say(f"{name}\n2")
    with pytest.raises(SystemExit):
        exit_codes(fail)
    out, err = capsys.readouterr()
    assert out == "\\x1b[2J größe 重み \\udc80\\r\\n2\n"
    assert err == "error: \\x1b[2J größe 重み \\udc80\\r: one\ntwo\n"


@pytest.mark.parametrize(("last", "message"), [("7", r"saved as \S+7\. "), ("5", r"not saved, the last .* is \S+5\. ")])
def test_whether_weights_without_a_loss_are_there(last: str, message: str) -> None:
    """`checkpoint.every` may have saved weights before their loss was known."""
    with pytest.raises(TrainingError, match=message):
        check_validation(7, float("nan"), Path("checkpoints") / last)


@pytest.mark.long
def test_a_closed_pipe_ends_the_process_silently() -> None:
    """`head` closes its pipe early, for instance."""
    lines = "from jaxdist.config.exits import exit_codes\nexit_codes(lambda: [print('line') for _ in range(100_000)])"
    with subprocess.Popen(
        [sys.executable, "-c", lines], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_errors_of_a_disk_are_reported() -> None:
    message = re.escape("[Errno 28] No space left on device: 'report.html'; make room, or give another --output")
    with pytest.raises(TrainingError, match=f"^{message}$"), writes_to("--output"):
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")


LONG = "9" * 5000
LONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"optimizer": {"adjust_lr_fn": LONG}}, r"optimizer\.adjust_lr_fn = '9+\.\.\.9+': input should be"),
    "number": ({"train": {"steps": 10**400}}, r"train\.steps = 10+\.\.\.0+: input should be"),
    "list": ({"train": {"batch": [LONG] * 5000}}, r"train\.batch = \['9+\.\.\.9+', .*\.\.\.\]: "),
    "family": ({"model": {"family": LONG}}, r"model\.family = '9+\.\.\.9+': no such family"),
    "unknown field": ({"train": {LONG: {LONG: 1}}}, r"train\.9{80} = \{'9+\.\.\.9+': 1\}: no such field"),
    "mesh": ({"parallel": {"mesh": f"data={LONG}"}}, r"parallel\.mesh = 'data=9+\.\.\.9+'"),
    "plugins": ({"plugins": LONG}, r"plugins = 9{500}: not loaded"),
    "many": ({"train": {"skip": [LONG] * 5000}}, r"\.19 = '9+\.\.\.9+': .*\nx: 4,980 more are wrong$"),
}


@pytest.mark.parametrize("case", LONG_VALUES)
def test_long_values_are_shortened(case: str) -> None:
    """As a damaged file has them."""
    values, message = LONG_VALUES[case]
    with pytest.raises(ConfigError, match=message) as error:
        Experiment.parse(values, "x").parallel.axes(8)
    assert max(map(len, str(error.value).splitlines())) < 1200
