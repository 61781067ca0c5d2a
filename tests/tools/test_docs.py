"""The code of docs/tools.md runs as it stands, one block after the other."""

import re
from pathlib import Path


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    file = tmp_path / "page_of_tools.py"
    file.write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(str(tmp_path))
    import page_of_tools

    assert page_of_tools.rewards == {"note": 2.0}
