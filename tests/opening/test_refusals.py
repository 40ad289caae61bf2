"""What cannot be opened is refused by name, with the reason."""

import keras_hub
import pytest
from keras_hub.src.models.blip2.blip2_custom_opt import BLIP2CustomOPT
from keras_hub.src.models.blip2.blip2_qformer import BLIP2QFormer
from keras_hub.src.models.blip2.blip2_vision_encoder import BLIP2VisionEncoder

import backbone_surgery as bs
from tests.families import ROWS


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_bidirectional_attention": True}, "attention to earlier tokens .* embeds texts"),
        ({"dtype": "float16"}, "another dtype than float16, in which KerasHub clips"),
    ],
)
def test_blocks_of_gemma_that_are_refused(name, options, words):
    backbone = ROWS[name].make(num_layers=1, **options)
    with pytest.raises(bs.SurgeryError, match=f"open at 'decoder_block_0': expected {words}"):
        bs.open_backbone(backbone)


@pytest.mark.slow
def test_a_drafter_is_refused():
    """KerasHub's task for drafters says so of the attention of each block."""
    backbone = ROWS["gemma4"].make(num_layers=1)
    backbone.transformer_layers[0].attention.is_kv_shared_layer = True
    with pytest.raises(bs.SurgeryError, match=r"a block with keys and values. .* a drafter"):
        bs.open_backbone(backbone)


def make_pali_gemma():
    return keras_hub.models.PaliGemmaBackbone(
        60, 8, 1, 2, 1, 16, 16, 8, 4, 2, 8, 1, vit_intermediate_dim=8
    )


def make_blip2():
    encoder = BLIP2VisionEncoder(8, 4, 1, 2, 8, 8, True, True, True, True, 0.0, 1e-6, 0.02)
    former = BLIP2QFormer(2, 1, 2, 8, 8, 8, 2, 0.0, 1e-6)
    text = BLIP2CustomOPT(60, 1, 2, 16, 16, 2, 0.0, 32, 8)
    return keras_hub.models.BLIP2Backbone(encoder, former, text)


def make_parseq():
    encoder = keras_hub.models.ViTBackbone((8, 8, 3), (4, 4), 1, 2, 16, 16, use_class_token=False)
    return keras_hub.models.PARSeqBackbone(encoder, 60, 8, 16, 1, 2, 16)


UNSUPPORTED = {
    "pali_gemma": (make_pali_gemma, "PaliGemma, whose prompt attends .* both directions.* Gemma 3"),
    "bart": (lambda: keras_hub.models.BartBackbone(60, 1, 2, 16, 16), "an encoder-decoder model"),
    "t5": (lambda: keras_hub.models.T5Backbone(60, 1, 2, 16, 16), "an encoder-decoder model"),
    "blip2": (make_blip2, "BLIP-2, which puts images before the text"),
    "parseq": (make_parseq, "PARSeq, which reads the text off an image"),
    "vit": (
        lambda: keras_hub.models.ViTBackbone((8, 8, 3), (4, 4), 1, 2, 8, 8),
        "a model of images, which takes no text",
    ),
}


@pytest.mark.by_default(1)
@pytest.mark.filterwarnings("ignore")  # of KerasHub, as it builds them
@pytest.mark.parametrize(("make", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_architectures_that_are_not_opened(make, words):
    backbone = make()
    words = f"a decoder-only language model with its .* in the graph. Received {words}"
    with pytest.raises(bs.UnknownArchitectureError, match=words):
        bs.open_backbone(backbone)
