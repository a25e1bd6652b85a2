"""Every file of `models/` is a preset that reads, and describes what it says it describes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from ssd_ascend import catalogue
from ssd_ascend.config.preset import Dims, Preset, Source, load_preset
from ssd_ascend.errors import ConfigError

DIMS = {
    **{"hidden_size": 8, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2},
    **{"head_dim": 2, "intermediate_size": 16, "vocab_size": 32},
}


@pytest.mark.parametrize("name", catalogue.names("models"))
def test_every_preset_reads(name: str) -> None:
    preset = catalogue.find_preset(name)
    assert preset.target.dims.kv_bytes_per_token > 0
    assert preset.description


def test_the_embedded_preset_is_the_model_of_the_wheel() -> None:
    """The sizes are those the .gguf itself states, read from the file that `make setup` installed."""
    target = catalogue.find_preset("smollm2-135m").target
    fields = GGUFReader(catalogue.resolve_model("smollm2-135m")).fields

    def stated(key: str) -> int:
        return int(fields[f"llama.{key}"].contents())

    dims = target.dims
    assert target.family == "llama"
    assert (dims.hidden_size, dims.num_layers) == (stated("embedding_length"), stated("block_count"))
    assert (dims.num_heads, dims.num_kv_heads) == (stated("attention.head_count"), stated("attention.head_count_kv"))
    assert (dims.head_dim, dims.intermediate_size) == (stated("rope.dimension_count"), stated("feed_forward_length"))
    assert (dims.vocab_size, dims.max_model_len) == (stated("vocab_size"), stated("context_length"))


def test_kv_bytes_of_a_token() -> None:
    assert Dims(**DIMS, tie_embeddings=True, dtype="float32").kv_bytes_per_token == 2 * 3 * 2 * 2 * 4
    assert Dims(**DIMS, tie_embeddings=True).kv_bytes_per_token == 2 * 3 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "no multiple of num_kv_heads 3"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_experts": 4, "expert_size": 8}, "experts_per_token is 0"),
        (
            {"num_experts": 4, "expert_size": 8, "experts_per_token": 5},
            "experts_per_token 5 is more than",
        ),
    ],
)
def test_sizes_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dims(**{**DIMS, **change}, tie_embeddings=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "source gives nothing"),
        ({"hub": "a/b", "path": "c"}, "source gives hub, path"),
        ({"package": "a"}, "package and file belong together"),
        ({"path": "a", "file": "b"}, "package and file belong together"),
    ],
)
def test_a_source_is_exactly_one_place(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Source(**values)


MODEL = "\n".join(f"{key} = {value}" for key, value in DIMS.items()) + "\ntie_embeddings = false\n"
PAIR = (
    f'[target]\nname = "T"\nfamily = "llama"\nsource.hub = "o/t"\n[target.dims]\n{MODEL}'
    f'[draft]\nname = "D"\nfamily = "llama"\nsource.path = "head"\n[draft.dims]\n{MODEL}'
)


def write(folder: Path, text: str) -> Path:
    path = folder / "pair.toml"
    path.write_text(text)
    return path


def test_a_pair_reads_with_the_words_of_the_flags(tmp_path: Path) -> None:
    path = write(tmp_path, PAIR + '[speculation]\nspeculator = "ssd"\ndrafter = "eagle3"\nlookahead = 4\n')
    preset = load_preset(path)
    assert isinstance(preset, Preset)
    assert preset.draft is not None
    assert preset.speculation is not None
    assert (preset.draft.source.path, preset.speculation.lookahead) == ("head", 4)


def test_a_draft_without_a_way_to_use_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must say how to speculate.*\[speculation\]"):
        load_preset(write(tmp_path, PAIR))


def test_a_misspelt_key_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pair.toml:3: target.familly: unknown key.*did you mean 'family'"):
        load_preset(write(tmp_path, PAIR.replace("family", "familly", 1)))
