from pathlib import Path

import pytest
import torch

from rollout.config import ModelConfig
from rollout.families.registry import FAMILIES, family_class, load_family
from tests.fake_family import GaussianFamily

CPU = torch.device("cpu")


def test_every_registered_name_is_a_family() -> None:
    assert [family_class(name).__name__ for name in FAMILIES] == ["SD3Family"]


def test_a_plug_in_is_named_by_module_and_class() -> None:
    config = ModelConfig(family="tests.fake_family:GaussianFamily", path="anything")
    assert isinstance(load_family(config, CPU), GaussianFamily)


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model family 'sd4': choose from \['sd3'\]"):
        load_family(ModelConfig(family="sd4", path="anything"), CPU)


def test_a_plug_in_must_be_a_family() -> None:
    with pytest.raises(ValueError, match="'pathlib:Path' is no subclass"):
        family_class("pathlib:Path")


def test_a_missing_folder_says_where_it_was_looked_for() -> None:
    with pytest.raises(ValueError, match=r"'configs/model/none': no such folder \(looked in /"):
        load_family(ModelConfig(path="configs/model/none"), CPU)


def test_a_hub_id_that_cannot_be_fetched_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match="neither a folder nor a hub id that could be fetched"):
        load_family(ModelConfig(path="flowcredit-tests/no-such-model"), CPU)


def test_a_folder_in_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model_index\.json: not a model in diffusers"):
        load_family(ModelConfig(path=str(tmp_path)), CPU)


def test_another_pipeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="holds a FluxPipeline, not a StableDiffusion3Pipeline"):
        load_family(ModelConfig(path=str(tmp_path)), CPU)
