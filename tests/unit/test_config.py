"""Every setting is checked where it is defined, and a mistake is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.config import (
    PRESETS,
    RunConfig,
    load_config,
    make_config,
    merge_fields,
    parse_assignment,
    preset_fields,
    reference_config,
    to_toml,
    without_effect,
)
from blocktrain.errors import ConfigError


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_survive_a_round_trip(preset: str, tmp_path: Path):
    config = make_config(preset_fields(preset))
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "run.toml") == config
    assert load_config(tmp_path / "run.toml").digest == config.digest


def test_awkward_strings_survive_a_round_trip(tmp_path: Path):
    config = make_config({"data": {"corpus": 'a "quoted" \\ path\n# with é and 😀'}})
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "run.toml") == config


def test_a_run_from_before_a_setting_is_read_with_what_it_did_then(tmp_path: Path):
    config = make_config({"model": {"short_conv": 0, "attention_ratio": 1.0}, "train": {"samples": "shared"}})
    lines = to_toml(config).splitlines(keepends=True)
    (tmp_path / "run.toml").write_text("".join(line for line in lines if not line.startswith(("short_conv", "samples", "attention_ratio"))))
    assert "short_conv" not in (tmp_path / "run.toml").read_text()
    assert load_config(tmp_path / "run.toml") == config
    (tmp_path / "mine.toml").write_text("[model]\nblocks = 2\n")  # what a person leaves out has today's default
    assert load_config(tmp_path / "mine.toml").model.short_conv == RunConfig().model.short_conv > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": {"width": "wide"}}, ["model.width", "'wide'"]),
        ({"model": {"blokcs": 3}}, ["model.blokcs", "did you mean blocks"]),
        ({"modle": {}}, ["modle", "did you mean model"]),
        ({"model": {"width": 130, "heads": 4}}, ["model.heads", "130"]),
        ({"model": {"width": 32, "heads": 2, "attention_ratio": 0.3}}, ["model.heads", "attention_ratio 0.3", "4.8"]),
        ({"model": {"blocks": 0}}, ["model.blocks", "0"]),
        ({"train": {"lr": float("nan")}}, ["train.lr"]),
        ({"train": {"lr": -1.0}}, ["train.lr", "-1"]),
        ({"train": {"steps": True}}, ["train.steps"]),
        ({"train": {"steps": 1.5}}, ["train.steps", "1.5"]),
        ({"train": 3}, ["train"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"noise": {"sigma_min": 10.0, "sigma_max": 1.0}}, ["noise.sigma_min", "noise.sigma_max"]),
        ({"noise": {"partition": [10.0, 5.0, 6.0, 1.0]}}, ["noise.partition", "fall"]),
        ({"noise": {"partition": [10.0, 1.0]}}, ["noise.partition", "4"]),
        ({"noise": {"partition": "even"}}, ["noise.partition", "even"]),
        ({"objective": {"input": "upstream", "span": 4}}, ["objective.span", "model.blocks"]),
        ({"objective": {"input": "independent", "span": 2}}, ["objective.span", "upstream"]),
        ({"objective": {"span": 2}}, ["objective.span", "objective.input"]),
        ({"objective": {"input": "upstream", "vote_weight": 0.5}}, ["objective.vote_weight", "objective.input"]),
        ({"objective": {"denoise_weight": 1.0, "vote_weight": 0.5}}, ["objective.vote_weight", "objective.denoise_weight"]),
        ({"objective": {"vote_weight": 1.5}}, ["objective.vote_weight", "1.5"]),
        (
            {"objective": {"denoise_weight": 1.0, "anchor_weight": 0.0, "loss": "embedding_mse"}, "model": {"block_heads": True}},
            ["model.block_heads", "objective.loss"],
        ),
        ({"objective": {"vote_weight": 0.5}, "train": {"order": "sequential"}}, ["objective.vote_weight", "train.order"]),
        ({"objective": {"input": "upstream"}, "train": {"samples": "own"}}, ["train.samples", "objective.input"]),
        ({"objective": {"input": "independent", "private_layers": 1}}, ["objective.private_layers"]),
        ({"objective": {"denoise_weight": 0.0, "anchor_weight": 0.0}}, ["objective.denoise_weight"]),
        ({"objective": {"denoise_weight": 0.0, "anchor_weight": 1.0, "start": "noise"}}, ["objective.start"]),
        ({"objective": {"denoise_weight": 1.0, "start": "noise", "window": 256}}, ["objective.window", "model.positions"]),
        ({"objective": {"input": "upstream", "span": 2}, "train": {"order": "sequential"}}, ["train.order", "span"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting(fields: dict, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        make_config(fields, "run.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text", ["train.steps", "=3", "a.b.c=1", ".steps=3", ""])
def test_malformed_assignments_are_refused(text: str):
    with pytest.raises(ConfigError, match="--set"):
        parse_assignment(text)


def test_assignments_are_read_as_toml_or_as_text():
    assert parse_assignment("train.steps=500") == {"train": {"steps": 500}}
    assert parse_assignment("train.lr=1e-3") == {"train": {"lr": 1e-3}}
    assert parse_assignment("objective.start=zero") == {"objective": {"start": "zero"}}
    assert parse_assignment("noise.partition=[10.0, 5.0, 1.0]") == {"noise": {"partition": [10.0, 5.0, 1.0]}}
    assert parse_assignment("seed=3") == {"seed": 3}
    assert make_config(parse_assignment("train.lr=1")).train.lr == 1.0


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="laptop"):
        preset_fields("lapto")


def test_digest_ignores_where_the_text_lies_but_nothing_else():
    base = RunConfig()
    assert make_config({"data": {"corpus": "python"}}).digest == base.digest
    assert make_config({"seed": 1}).digest != base.digest
    assert make_config({"train": {"lr": 0.009}}).digest != base.digest


@pytest.mark.parametrize("preset", PRESETS)
def test_the_reference_has_the_same_shape_optimizer_and_data(preset: str):
    config = make_config(
        merge_fields(preset_fields(preset), {"noise": {"partition": "information"}, "objective": {"denoise_weight": 1.0, "start": "noise"}})
    )
    reference = reference_config(config)
    assert make_config(reference.model_dump()) == reference  # passes every check
    assert (reference.model, reference.data, reference.seed) == (config.model, config.data, config.seed)
    assert reference.train.model_copy(update={"order": config.train.order}) == config.train
    assert reference.objective.span == config.model.blocks


def test_when_a_vote_begins_says_nothing_where_there_is_none():
    late, plain = (make_config({"objective": {"vote_from": share}}) for share in (0.5, 0.0))
    assert late.digest == plain.digest
    assert without_effect(late) == ["objective.vote_from has no effect while objective.vote_weight = 0"] and not without_effect(plain)
    voting = {"vote_weight": 0.5, "vote_from": 0.5}
    config = make_config({"objective": voting, "train": {"steps": 7}})
    assert [config.votes_at(step) for step in range(7)] == [False] * 4 + [True] * 3
    assert [config.own_samples_at(step) for step in range(7)] == [True] * 4 + [False] * 3
    never = make_config({"objective": {"vote_weight": 0.5, "vote_from": 0.999}, "train": {"steps": 60}})
    assert without_effect(never) == ["objective.vote_weight has no effect: objective.vote_from = 0.999 leaves none of 60 steps"]
    assert len({make_config({"objective": each}).digest for each in (voting, {"vote_weight": 0.5}, {})}) == 3
    assert without_effect(make_config({"objective": voting, "model": {"blocks": 1}})) == ["objective.vote_weight has no effect with one block"]
