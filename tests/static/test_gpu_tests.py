"""`make test-gpu` names the folders it runs, so that it needs no package of the others."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_for_a_gpu_is_in_a_place_that_the_target_names():
    makefile = (ROOT / "Makefile").read_text()
    (places,) = re.findall(r"^GPU_TESTS := (.*)$", makefile, re.MULTILINE)
    named = [ROOT / place for place in places.split()]
    assert all(place.exists() for place in named)
    mark = "pytest.mark." + "gpu"
    marked = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()]
    assert len(marked) > 20
    assert [p for p in marked if not any(p.is_relative_to(place) for place in named)] == []
