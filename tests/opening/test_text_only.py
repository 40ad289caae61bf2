"""The text-only view of a backbone that takes images too."""

import keras
import keras_hub
import numpy as np
import pytest
from keras_hub.src.models.gemma3.gemma3_vision_encoder import Gemma3VisionEncoder

import backbone_surgery as bs
from backbone_surgery.generation.request import resolve_stop_ids
from backbone_surgery.opening.open import find_family
from tests.families import ROWS
from tests.helpers import ragged, relative, train_pieces

SIZE = 8


class Encoder(keras.layers.Layer):
    """Stands for the encoders of images and of sounds: some embeddings for each of them."""

    num_vision_tokens_per_image, input_feat_size = 4, SIZE

    def call(self, inputs, mask=None):
        x = inputs["pixel_values"] if isinstance(inputs, dict) else inputs
        return x[:, :, :1, :1] + keras.ops.ones((4, 32))


def make_gemma3():
    encoder = Gemma3VisionEncoder(SIZE, 4, 2, 8, 1, 8, output_dim=32, pool_size=2)
    return ROWS["gemma3"].make(image_size=SIZE, vision_encoder=encoder)


def make_gemma4():
    encoders = {"vision_encoder": Encoder(), "audio_encoder": Encoder()}
    return ROWS["gemma4"].make(image_size=SIZE, **encoders)


@pytest.fixture(scope="module")
def backbone():
    return make_gemma3()


def without_images(backbone, text):
    """Complete a text by no image, and no sound, for each row."""
    rows, width = text["token_ids"].shape
    inputs = dict(text)
    for name, tensor in backbone.input.items():
        if name == "position_ids":
            inputs[name] = np.tile(np.arange(width, dtype="int32"), (rows, 1))
        elif name.endswith("_mask") and len(tensor.shape) == 2:
            inputs.setdefault(name, np.zeros((rows, width), "int32"))
        elif name not in text:
            inputs[name] = np.zeros((rows, 0, *(n or 1 for n in tensor.shape[2:])), tensor.dtype)
    return inputs


@pytest.mark.parametrize(
    ("name", "make"),
    [("gemma3", make_gemma3), pytest.param("gemma4", make_gemma4, marks=pytest.mark.slow)],
)
def test_a_backbone_with_images_opens_for_text_alone(name, make, rng):
    backbone = make()
    text = ragged(rng, (12, 5), 12)
    text["padding_mask"] = text["padding_mask"].astype("int32")
    wanted = backbone.predict_on_batch(without_images(backbone, text))
    opened = bs.open_backbone(backbone)
    assert set(opened.input) == {"token_ids", "padding_mask"}
    assert bs.sites(opened) == bs.sites(ROWS[name].make())
    gone = (Encoder, Gemma3VisionEncoder, opened.family.images)
    assert not any(isinstance(layer, gone) for layer in opened.layers)
    real = text["padding_mask"].astype(bool)
    assert relative(opened.predict_on_batch(text), wanted, real) <= 5e-6
    assert max(bs.check(opened).errors.values()) <= 5e-6
    bs.rewire(opened)


@pytest.mark.slow
def test_what_a_preprocessor_gives_without_images_is_left_out(backbone, rng):
    prompt = without_images(backbone, ragged(rng, (5, 3), 8))
    prompt["position_ids"] = np.tile(np.arange(8), (2, 1))  # as of Gemma 4
    assert {"images", "vision_mask", "vision_indices"} < set(prompt)
    lm = bs.CachedCausalLM(bs.open_backbone(backbone))
    lm.compile(sampler="greedy")
    text = {name: prompt[name] for name in ("token_ids", "padding_mask")}
    settings = {"max_length": 8, "stop_token_ids": None}
    got, wanted = lm.generate(prompt, **settings), lm.generate(text, **settings)
    np.testing.assert_array_equal(got["token_ids"], wanted["token_ids"])


def make_tokenizer(special):
    """Train a tokenizer with these tokens, and the usual ones of Gemma."""
    proto = train_pieces(
        special,
        vocab_size=56,
        **{f"{name}_id": i for i, name in enumerate(("pad", "eos", "bos", "unk"))},
        **{f"{name}_piece": f"<{name}>" for name in ("pad", "eos", "bos", "unk")},
    )
    return keras_hub.models.Gemma3Tokenizer(proto=proto, has_vision_tokens="<img>" in special)


@pytest.fixture
def preprocessor():
    return keras_hub.models.Gemma3CausalLMPreprocessor(
        make_tokenizer(["<img>", "<start_of_image>", "<end_of_image>", "<end_of_turn>"]),
        image_converter=keras_hub.layers.Gemma3ImageConverter(image_size=(SIZE, SIZE)),
        sequence_length=16,
        num_vision_tokens_per_image=4,
    )


@pytest.mark.slow
def test_text_is_generated_as_by_kerashub(backbone, preprocessor):
    upstream = keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=preprocessor)
    lm = bs.CachedCausalLM(backbone, preprocessor)
    for model in (upstream, lm):
        model.compile(sampler="greedy")
    assert lm.generate("the quick", max_length=16) == upstream.generate("the quick", max_length=16)


def test_the_end_of_a_turn_is_a_stop_token_where_there_is_one(preprocessor):
    family, tokenizer = find_family(ROWS["gemma3"].make()), preprocessor.tokenizer
    ends = [tokenizer.end_token_id, tokenizer.token_to_id("<end_of_turn>")]
    assert resolve_stop_ids("auto", preprocessor, 60, family.stop_tokens, "generate") == ends
    plain = keras_hub.models.Gemma3CausalLMPreprocessor(make_tokenizer([]))
    ends = [plain.tokenizer.end_token_id]
    assert resolve_stop_ids("auto", plain, 60, family.stop_tokens, "generate") == ends


@pytest.mark.slow
def test_fit_takes_text_and_no_images(backbone, preprocessor):
    lm = bs.CachedCausalLM(backbone, preprocessor)
    lm.compile(optimizer="sgd")
    samples = {"prompts": ["the quick", "brown"], "responses": ["fox", "dog"]}
    options = {"batch_size": 2, "shuffle": False, "verbose": 0}
    assert np.isfinite(lm.fit(samples, **options).history["loss"]).all()
    samples["images"] = np.zeros((2, 1, SIZE, SIZE, 3), "float32")
    with pytest.raises(bs.SurgeryError, match=r"opened for text alone. Received \['images'\] too"):
        lm.preprocess_samples(samples)
