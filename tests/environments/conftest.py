import pytest

from tests.toy import make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))
