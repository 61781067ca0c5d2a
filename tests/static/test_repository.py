"""What workflows, images, forms and metadata name exists in this repository."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
IMAGES = sorted((ROOT / "docker").glob("Dockerfile.*"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
ATTRIBUTES = {"label", "description", "placeholder", "value", "render", "options", "multiple"}


def project():
    """`[project]` of pyproject.toml: Python 3.10 has no parser for it."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = dict(re.findall(r"^([a-z_]+) = (\[.*\])$", section, re.MULTILINE))
    fields = dict(re.findall(r'^([a-z-]+) = "(.*)"$', text, re.MULTILINE))
    return fields, {name: yaml.safe_load(items) for name, items in extras.items()}


def runs_here(command):
    """Whether a command is a target of the Makefile, a program of this repository or a sysctl."""
    if command.startswith("sudo sysctl -w "):
        return True
    program, *arguments = command.split()
    if program == "make":
        return set(arguments) <= TARGETS
    return (ROOT / program).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_is_here(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    assert all(map(runs_here, commands)), commands
    assert all(job["timeout-minutes"] <= 60 for job in jobs)
    supported = SpecifierSet(project()[0]["requires-python"])
    versions = re.findall(r'"(3\.\d+)"', path.read_text())
    assert versions
    assert all(version in supported for version in versions)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_built_from_what_is_here(path):
    text = path.read_text()
    names = re.findall(r"-f (\S+) ", text)
    assert names == [str(path.relative_to(ROOT))], "the first line says how to build it"
    extras = [name for group in re.findall(r"\.\[(.*?)\]", text) for name in group.split(",")]
    assert set(extras) <= set(project()[1])
    made = re.findall(r'^(?:RUN make |CMD \["make", ")([a-z-]+)', text, re.MULTILINE)
    assert set(made) <= TARGETS
    for module in re.findall(r'"-m", "([\w.]+)"', text):
        assert find_spec(module) is not None
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_the_fields_that_github_knows(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    for entry in form["body"]:
        assert set(entry.get("attributes", {})) <= ATTRIBUTES, entry


def test_extras_name_packages_and_each_other():
    _, extras = project()
    for name, items in extras.items():
        for requirement in map(Requirement, items):
            if requirement.name == "verl":
                assert requirement.extras <= set(extras), name


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    fields, _ = project()
    assert str(citation["version"]) == fields["version"]
    assert citation["license"] == fields["license"]
