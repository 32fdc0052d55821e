"""The conversion benchmark works, at a small size."""

import sys
from pathlib import Path

import pytest

from parity_tests.validation import streaming


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "speed", "code"), [(1e10, 0.0, None), (0.0, 0.0, 1), (1e10, 1e9, 1)])
def test_all_pairs(
    memory: float,
    speed: float,
    code: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exits with 1 where memory or speed misses its goal."""
    for name, value in {"SETTLE": 0, "MEMORY": memory, "SPEED": speed}.items():
        monkeypatch.setattr(streaming, name, value)
    monkeypatch.setattr(sys, "argv", ["streaming", "--bytes", "1e7", "--turns", "1", "--output", str(tmp_path / "new")])
    if code is None:
        streaming.main()
    else:
        with pytest.raises(SystemExit, match=str(code)):
            streaming.main()
    assert capsys.readouterr().out.count("of the pace of cp") >= len(streaming.PATHS)
