"""The model folder in configs/: what plain diffusers makes of it, and what the reward sees."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from scipy.stats import rankdata

from benchmarks.shapes_model.export import load_exported
from benchmarks.shapes_model.networks import caption_ids
from benchmarks.shapes_model.scores import noise_of_line, sample_images
from rewards.shapes.grammar import CATEGORIES, all_records
from rewards.shapes.renderer import RELATION_AXIS, render
from rewards.shapes.reward import ShapesReward
from rewards.shapes.verifier import judge

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "model" / "shapes"
EVAL_FILE = ROOT / "configs" / "prompts" / "shapes_eval.jsonl"


@pytest.fixture(scope="module")
def pipeline():
    opened = StableDiffusion3Pipeline.from_pretrained(FOLDER, text_encoder_3=None, tokenizer_3=None)
    opened.set_progress_bar_config(disable=True)
    return opened


def _sample(pipeline, prompts, seed, **more):
    return pipeline(
        prompts,
        height=32,
        width=32,
        num_inference_steps=10,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **{"max_sequence_length": 1, **more},
    ).images


def _facts_right(record, seen):
    """Are classes, counts, colours and the relation right, however well the objects are drawn?"""
    wanted = [item["class"] for item in record["include"] for _ in range(item["count"])]
    if sorted(wanted) != sorted(s.shape for s in seen) or "unnamed" in {s.color for s in seen}:
        return False
    by_class = {s.shape: s for s in seen}
    for item in record["include"]:
        own = by_class[item["class"]]
        if own.color != item.get("color", own.color):
            return False
        if "position" in item:
            relation, target = item["position"]
            axis, sign = RELATION_AXIS[relation]
            boxes = by_class[record["include"][target]["class"]].box, own.box
            target_middle, middle = (box[axis] + box[axis + 2] / 2 for box in boxes)
            if sign * (target_middle - middle) <= 0:
                return False
    return True


def _area_under_curve(values, right):
    num_right, num_wrong = right.sum(), (~right).sum()
    rank_sum = rankdata(values)[right].sum() - num_right * (num_right + 1) / 2
    return rank_sum / (num_right * num_wrong)


@pytest.fixture(scope="module")
def scored(pipeline):
    """(strict, graded, facts right) of 207 held-out lines, by plain diffusers."""
    records = [json.loads(line) for line in EVAL_FILE.read_text().splitlines()][::16] * 3
    prompts = [record["prompt"] for record in records]
    images = (_sample(pipeline, prompts, seed=0) * 255).round().astype(np.uint8)
    verdicts = judge(images, records)
    facts = [_facts_right(r, v.seen) for r, v in zip(records, verdicts, strict=True)]
    return (
        np.array([v.strict for v in verdicts]),
        np.array([v.graded for v in verdicts]),
        np.array(facts),
    )


def test_folder_is_small_and_holds_float16_safetensors_only():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt", ".md"}
    for path in FOLDER.rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}


def test_plain_opening_computes_in_float32(pipeline):
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        assert {p.dtype for p in getattr(pipeline, name).parameters()} == {torch.float32}


def test_sizes_and_schedule(pipeline):
    assert pipeline.tokenizer.model_max_length == 12
    assert pipeline.transformer.config.in_channels == 16
    assert pipeline.transformer.config.sample_size == 4
    assert pipeline.vae_scale_factor == 8
    assert pipeline.scheduler.config.shift == 3.0
    assert pipeline.vae.config.scaling_factor > 0
    assert pipeline.vae.config.shift_factor is not None


def test_every_prompt_of_the_grammar_is_one_token_a_word(pipeline):
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2):
        for category in CATEGORIES:
            for record in all_records(category):
                ids = tokenizer(record["prompt"]).input_ids
                assert len(ids) == len(record["prompt"].split()) + 2 <= 12
        assert len(tokenizer("zebra").input_ids) == 7  # letters; nothing is unknown


def test_prompts_change_the_embeddings(pipeline):
    prompts = ["a photo of a red circle", "a photo of a blue circle", ""]
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    assert embeds.shape == (3, 13, 128)
    assert pooled.shape == (3, 128)
    assert embeds[:, 12].abs().max() == 0.0  # the token that stands for the missing T5
    assert (pooled[0] - pooled[1]).abs().max() > 0.1


@pytest.mark.parametrize("num_zero_tokens", [1, 16])
def test_training_encodes_text_as_the_pipeline_does(pipeline, num_zero_tokens):
    model, _ = load_exported(FOLDER)
    prompts = ["a photo of three crosses", "a photo of a red circle and a blue square", ""]
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=num_zero_tokens
    )
    own_embeds, own_pooled = model.encode(caption_ids(prompts), num_zero_tokens)
    assert own_embeds.requires_grad
    torch.testing.assert_close(own_embeds, embeds, rtol=0, atol=0)
    torch.testing.assert_close(own_pooled, pooled, rtol=0, atol=0)


def test_the_script_samples_as_the_pipeline_does(pipeline):
    model, autoencoder = load_exported(FOLDER)
    prompts = ["a photo of four squares", "a photo of a cross above a circle"]
    noise = torch.stack([noise_of_line(0), noise_of_line(1)])
    images = (_sample(pipeline, prompts, seed=0, latents=noise) * 255).round().astype(int)
    own = sample_images(model, autoencoder, prompts, noise).astype(int)
    assert np.abs(own - images).max() <= 1


def test_score_is_decent_and_improvable(scored):
    strict, graded, _ = scored
    assert 0.25 <= strict.mean() <= 0.75
    assert 0.4 <= graded.mean() <= 0.95


def test_scenes_survive_the_autoencoder(pipeline):
    """Else no policy could reach a perfect score."""
    records = [json.loads(line) for line in EVAL_FILE.read_text().splitlines()][::3]
    rng = np.random.default_rng(0)
    scenes = torch.from_numpy(np.stack([render(record, rng) for record in records]))
    with torch.no_grad():
        latents = pipeline.vae.encode(scenes.permute(0, 3, 1, 2) / 127.5 - 1).latent_dist.mode()
        decoded = pipeline.vae.decode(latents).sample.permute(0, 2, 3, 1)
    images = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    assert np.mean([verdict.strict for verdict in judge(images, records)]) >= 0.97


def test_graded_separates_strictly_right_from_wrong(scored):
    strict, graded, _ = scored
    assert _area_under_curve(graded, strict) >= 0.9


def test_graded_separates_right_facts_from_wrong_ones(scored):
    """The honest form of the line above: these facts know nothing of the graded score."""
    strict, graded, facts = scored
    assert facts[strict].all()
    assert _area_under_curve(graded, facts) >= 0.9


def test_wrong_samples_still_differ_in_grade(scored):
    strict, graded, _ = scored
    wrong = graded[~strict]
    assert wrong.std() > 0.1
    assert len(np.unique(wrong.round(6))) > 0.8 * len(wrong)


def test_long_zero_text_costs_little_quality(pipeline):
    """Trained with 1 and with 16 zero tokens: `max_sequence_length` may be either."""
    records = [json.loads(line) for line in EVAL_FILE.read_text().splitlines()][::8]
    prompts = [record["prompt"] for record in records]
    images = _sample(pipeline, prompts, seed=0, max_sequence_length=16)
    graded = ShapesReward()((images * 255).round().astype(np.uint8), prompts, records)["shapes"]
    assert graded.mean() >= 0.35


def test_card_holds_the_scores_of_the_folder():
    card = json.loads((FOLDER / "model_card.json").read_text())
    assert set(card["scores"]) == {*CATEGORIES, "all"}
    assert 0.35 <= card["scores"]["all"][0] <= 0.65
    assert card["autoencoder"]["strict"] >= 0.97
    text = (FOLDER / "README.md").read_text()
    assert f"| all | {card['scores']['all'][0]:.3f} |" in text
