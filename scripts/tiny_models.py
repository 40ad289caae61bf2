"""The two bundled tiny models before they are trained: sizes, tokenizers and initial weights.

`train_tiny_models.py` trains them. Tokenizers learn from stories of `story_grammar`.
"""

import io
import json
from dataclasses import dataclass
from random import Random
from typing import Any

import keras
import keras_hub
import numpy as np
import sentencepiece
from story_grammar import generate_story
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 1024
SEQUENCE_LENGTH = 256
TOKENIZER_STORIES = 4000
TRAIN_SEED, WEIGHT_SEED = 1, 3
END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        architecture: name of the KerasHub backbone, for the card.
        config: keyword arguments of the backbone, without the vocabulary size.
        gaps: what the model was seen to be bad at, for the card.
        cycles: optimizer steps of each cycle of warmup and decay. Each has a new optimizer; the
            return to a high rate gets small models out of having learned everything but one fact.
        batch_size: stories a step.
        peak_learning_rate: of the warmup and cosine decay schedule.
    """

    architecture: str
    config: dict[str, Any]
    gaps: str
    cycles: tuple[int, ...]
    batch_size: int = 16
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    gradient_norm: float = 1.0


RECIPES = {
    "tiny_gpt2": Recipe(
        architecture="GPT2",
        config={
            "num_layers": 6,
            "num_heads": 4,
            "hidden_dim": 128,
            "intermediate_dim": 512,
            "dropout": 0.0,
            "max_sequence_length": SEQUENCE_LENGTH,
        },
        gaps=(
            "It keeps names,\nobjects, the room, the mood and the number of characters well, but "
            "calls the pet by another\nword about one time in four, and its halves disagree on the "
            "time of day about as often."
        ),
        cycles=(2000, 800),
    ),
    "tiny_gemma": Recipe(
        architecture="Gemma",
        config={
            "num_layers": 6,
            "num_query_heads": 4,
            "num_key_value_heads": 2,
            "hidden_dim": 128,
            "head_dim": 32,
            # Half of it is the gate.
            "intermediate_dim": 512,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "attention_logit_soft_cap": 50.0,
            "final_logit_soft_cap": 30.0,
            "use_sliding_window_attention": True,
            # Half of the layers see no further. A story has up to 180 tokens, and at 64 the model
            # forgot the place: what sets it up is often further back.
            "sliding_window_size": 128,
            "dropout": 0.0,
        },
        gaps=(
            "It keeps names,\nobjects, the room, the mood and the number of characters well, but "
            "its halves disagree on the\ntime of day about one time in six."
        ),
        # The second cycle is what makes it remember the time of day.
        cycles=(1300, 800),
    ),
}


def write_stories(seed: int, count: int, without: frozenset[str] = frozenset()) -> list[str]:
    """Write `count` different stories, none of them in `without`.

    Args:
        seed: of the generator.
        count: how many.
        without: stories to leave out, so that held-out stories stay unseen.

    Returns:
        The texts.
    """
    rng = Random(seed)
    stories: dict[str, None] = {}
    while len(stories) < count:
        text = generate_story(rng).text
        if text not in without:
            stories[text] = None
    return list(stories)


def _train_byte_pairs(texts: list[str]) -> keras_hub.tokenizers.GPT2Tokenizer:
    """Train a byte-level byte-pair tokenizer whose end token is also its start token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    # Last, as in GPT-2: KerasHub's GPT-2 pads with token 0, and if that were the end token too,
    # generation would take the padding after a prompt for the end of the story.
    vocabulary = {**model["vocab"], END: len(model["vocab"])}
    return keras_hub.tokenizers.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)


def _train_sentence_pieces(texts: list[str]) -> keras_hub.tokenizers.GemmaTokenizer:
    """Train a SentencePiece tokenizer with Gemma's special tokens and byte fallback."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=proto,
        model_type="bpe",
        vocab_size=VOCABULARY_SIZE,
        byte_fallback=True,
        # As in Gemma: text in, the same text out, whatever its spaces.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        num_threads=1,
        minloglevel=2,
    )
    return keras_hub.models.GemmaTokenizer(proto=proto.getvalue())


def build_model(name: str) -> keras_hub.models.CausalLM:
    """Train the tokenizer of a recipe and build its untrained model.

    Args:
        name: one of `RECIPES`.

    Returns:
        The causal language model, with its preprocessor.
    """
    recipe = RECIPES[name]
    texts = write_stories(TRAIN_SEED, TOKENIZER_STORIES)
    is_gpt2 = recipe.architecture == "GPT2"
    tokenizer = _train_byte_pairs(texts) if is_gpt2 else _train_sentence_pieces(texts)
    keras.utils.set_random_seed(WEIGHT_SEED)
    backbone_cls = getattr(keras_hub.models, f"{recipe.architecture}Backbone")
    model_cls = getattr(keras_hub.models, f"{recipe.architecture}CausalLM")
    backbone = backbone_cls(vocabulary_size=tokenizer.vocabulary_size(), **recipe.config)
    if is_gpt2:
        _widen_initial_weights(backbone)
    preprocessor = model_cls.preprocessor_cls(tokenizer, sequence_length=SEQUENCE_LENGTH)
    return model_cls(backbone=backbone, preprocessor=preprocessor)


def _widen_initial_weights(backbone: keras_hub.models.Backbone) -> None:
    """Give a narrow GPT-2 initial weights that it learns from quickly.

    GPT-2's standard deviation of 0.02 suits widths of 768 and more. At a width of 128 it leaves
    attention flat for hundreds of steps, so kernels get 1/sqrt(width) here, as Gemma's have.
    Positions start as sines and cosines, of the same size as the token embeddings: in random
    ones it takes long to find the token before, which copying a name needs.
    """
    width = backbone.hidden_dim
    for variable in backbone.trainable_variables:
        if variable.path.endswith("kernel"):
            variable.assign(variable * (width**-0.5 / keras.ops.std(variable)))
    size = 0.05
    tokens = backbone.token_embedding.embeddings
    tokens.assign(tokens * (size / keras.ops.std(tokens)))
    positions = backbone.get_layer("position_embedding").position_embeddings
    angles = np.arange(positions.shape[0])[:, None] / 1000 ** (np.arange(0, width, 2) / width)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    positions.assign(waves * (size / waves.std()))
