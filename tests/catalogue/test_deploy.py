"""The deployment guides hold: every command parses and plans, both languages give the same ones, manifests are sound.

Manifests are held against schemas of the API versions they name, as far as that goes without a cluster.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ssd_ascend import catalogue, plan, speculate
from ssd_ascend.flags import add_engine_arguments, engine_config
from ssd_ascend.serve.arguments import parse_arguments
from ssd_ascend.serve.launch import plan_for
from ssd_ascend.serve.roles import Flags, roles_of
from tests.catalogue.kubernetes_schemas import schema_of

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
GUIDES = ("atlas-a3-server", "atlas-a3-superpod", "h100-node")
MANIFESTS = sorted(DEPLOY.glob("k8s/*.yaml"))


def commands(guide: Path) -> list[list[str]]:
    """Every command of a guide that runs a module of ours, as words behind `-m`."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", guide.read_text("utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.rstrip("& "), comments=True)
            modules = [i for i, word in enumerate(words[:-1], 1) if word == "-m" and "ssd_ascend." in words[i]]
            found += [words[i:] for i in modules]
    return found


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command with its own door, and plan what it plans."""
    module, *flags = words
    if module == "ssd_ascend.plan":
        args = plan.parser().parse_args(flags)
        catalogue.find_topology(args.topology)
        if not hasattr(args, "calibrate"):
            written = ("svg", "rank_table", "rank_table_version", "inventory", "json")
            assert plan.run({k: v for k, v in vars(args).items() if k not in written}) == 0
    elif module == "ssd_ascend.serve":
        args = parse_arguments(flags, add_engine_arguments)
        if hasattr(args, "topology"):
            found, topology = plan_for(args)
            for role in roles_of(found, topology, Flags()):
                if role.module == module:
                    own = parse_arguments(role.flags, add_engine_arguments)
                    assert engine_config(own).speculation.speculator == found.mode
        else:
            speculation = engine_config(args).speculation
            assert bool(speculation.speculators) != bool(speculation.draft_device)
    elif module == "ssd_ascend.speculate":
        config = engine_config(speculate.build_parser().parse_args(flags))
        assert config.speculation.speculator == "ssd"
    else:
        assert module == "ssd_ascend.doctor"


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_of_a_guide_parses(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commands(DEPLOY / f"{guide}.md")
    assert len(found) >= 3
    for words in found:
        check(words, monkeypatch)


@pytest.mark.parametrize("guide", GUIDES)
def test_both_languages_say_the_same(guide: str) -> None:
    english, chinese = DEPLOY / f"{guide}.md", DEPLOY / f"{guide}.zh-CN.md"
    assert commands(chinese) == commands(english)
    for file in (english, chinese):
        text = file.read_text("utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (file.parent / target).exists(), target
    assert chinese.read_text("utf-8").count("\n## ") == english.read_text("utf-8").count("\n## ")


def test_target_and_speculator_of_a_guide_fit_each_other() -> None:
    for guide in GUIDES:
        pairs = [words for words in commands(DEPLOY / f"{guide}.md") if "--lookahead" in words]
        assert len({words[words.index("--lookahead") + 1] for words in pairs}) <= 1, guide


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of a manifest."""
    spec = document.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    for task in spec.get("tasks", []):
        yield task["template"]
    for name in ("leaderTemplate", "workerTemplate"):
        if name in spec.get("leaderWorkerTemplate", {}):
            yield spec["leaderWorkerTemplate"][name]


def faults(document: dict[str, Any]) -> list[str]:
    """What its schema says against a document."""
    schema = schema_of(document["apiVersion"], document["kind"])
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_fit_their_schemas(file: Path) -> None:
    for document in yaml.safe_load_all(file.read_text("utf-8")):
        assert faults(document) == []


def test_a_slip_in_a_manifest_would_be_seen() -> None:
    """A wrong name, type, word or unit, anywhere."""
    job = list(yaml.safe_load_all((DEPLOY / "k8s" / "volcano-a3-server.yaml").read_text("utf-8")))[1]
    lws = next(yaml.safe_load_all((DEPLOY / "k8s" / "lws-a3-superpod.yaml").read_text("utf-8")))
    container = ("spec", "tasks", 0, "template", "spec", "containers", 0)
    for whole, path, key, value in (
        (job, ("spec",), "minavailable", 1),
        (job, ("spec",), "minAvailable", "1"),
        (job, ("spec", "policies", 0), "action", "Restart"),
        (job, (*container, "resources", "limits"), "huawei.com/Ascend910", 16),
        (job, (*container, "readinessProbe", "httpGet"), "port", 80_000),
        (lws, ("spec", "leaderWorkerTemplate"), "restartPolicy", "Always"),
        (lws, ("spec",), "startupPolicy", "LeaderFirst"),
    ):
        document = copy.deepcopy(whole)
        inner: Any = document
        for step in path:
            inner = inner[step]
        inner[key] = value
        assert len(faults(document)) == 1, key


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_are_sound(file: Path) -> None:
    """What no schema says: services select pods, mounts have volumes, devices are asked for as a whole."""
    documents = list(yaml.safe_load_all(file.read_text("utf-8")))
    labels = [pod["metadata"]["labels"] for document in documents for pod in pods(document)]
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            assert any(spec["selector"].items() <= each.items() for each in labels), "the service selects nobody"
        if "template" in spec:
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        for pod in pods(document):
            mounted = {volume["name"] for volume in pod["spec"].get("volumes", [])}
            for container in pod["spec"]["containers"]:
                assert {mount["name"] for mount in container.get("volumeMounts", [])} <= mounted
                amounts = container["resources"]
                assert amounts.get("requests", amounts["limits"]) == amounts["limits"]  # devices are not shared


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_commands_in_manifests_parse(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0
    for document in yaml.safe_load_all(file.read_text("utf-8")):
        for pod in pods(document):
            for container in pod["spec"]["containers"]:
                words = [*container["command"], *container["args"]]
                if words[0] == "sh":
                    words = shlex.split(words[-1])
                if "-m" in words:
                    check(words[words.index("-m") + 1 :], monkeypatch)
                    checked += 1
    assert checked


def test_a_superpods_group_is_as_large_as_its_plan() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "k8s" / "lws-a3-superpod.yaml").read_text("utf-8")))
    template = documents[0]["spec"]["leaderWorkerTemplate"]
    for pod in pods(documents[0]):
        assert int(pod["metadata"]["annotations"]["sp-block"]) == 16 * template["size"]
    assert template["size"] >= 4  # three servers of targets, and one for their speculators


def test_resources_are_those_of_the_topologies() -> None:
    named = {catalogue.find_topology(name).launch.k8s_resource for name in catalogue.names("topology")}
    for file in MANIFESTS:
        for document in yaml.safe_load_all(file.read_text("utf-8")):
            for pod in pods(document):
                for container in pod["spec"]["containers"]:
                    assert set(container["resources"]["limits"]) <= named
