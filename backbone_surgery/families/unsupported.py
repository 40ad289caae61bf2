"""Architectures that are not opened, and why: found by the class of a layer, or by their inputs."""

from keras import tree

from backbone_surgery import graph
from backbone_surgery.opening.family import register_refusal

IMAGE_FIRST = (
    "puts images before the text inside of the backbone, where slots are no tokens. Use a model "
    "that puts images into the text, such as Gemma 3: it is opened for text alone."
)

LAYERS = {
    "PaliGemmaDecoderBlock": (
        f"PaliGemma, whose prompt attends to itself in both directions, and which {IMAGE_FIRST}"
    ),
    "BLIP2QFormer": f"BLIP-2, which {IMAGE_FIRST}",
    "PARSeqDecoder": "PARSeq, which reads the text off an image. Use a language model.",
}


def refuse(model):
    """Say which unsupported architecture a model is of, and why it is not opened, if it is one."""
    names = {t.name for t in tree.flatten(model.input)}
    if any(name.startswith(("encoder_", "decoder_")) for name in names):
        return (
            "an encoder-decoder model, whose decoder attends to an encoder: that is not one text. "
            "Use a decoder-only model."
        )
    if "token_ids" not in names and names & {"images", "pixel_values"}:
        return "a model of images, which takes no text. Use a language model."
    layers = {type(node.operation).__name__ for node in graph.all_nodes(model)}
    return next((LAYERS[layer] for layer in LAYERS if layer in layers), None)


register_refusal(refuse)
