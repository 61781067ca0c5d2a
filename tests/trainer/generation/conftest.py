import pytest

from tests.trainer.generation.cases import saved_model


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))
