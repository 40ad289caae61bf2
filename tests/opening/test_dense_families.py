"""What single families need beyond the table of tests/test_family_table.py."""

import contextlib
import functools
import io

import keras
import keras_hub
import numpy as np
import pytest
import sentencepiece

import backbone_surgery as bs
from backbone_surgery.families import pre_norm
from tests.families import ROWS
from tests.helpers import relative
from tests.recording import patched
from tests.reference import run_chunks, tokens

SU = ROWS["phi3"].shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2", {"use_sliding_window_attention": True, "sliding_window_size": 4}),
        ("qwen3", {"sliding_window_size": 4}),
    ],
)
def test_qwen_has_a_window_where_kerashub_has(monkeypatch, rng, name, settings):
    """That is where attention is not fused, as on backends other than JAX."""
    backbone = ROWS[name].make(**settings)
    inputs = tokens(rng, 2, 12)
    fused = backbone(inputs)
    attention = type(backbone.transformer_layers[0]._self_attention_layer)
    for place in (pre_norm, __import__(attention.__module__, fromlist=["_"])):
        monkeypatch.setattr(place, "fused_attention_op_available", lambda: False)
    wanted = backbone(inputs)
    assert relative(fused, wanted) > 1e-2
    assert relative(bs.open_backbone(backbone)(inputs), wanted) <= 5e-6
    assert max(bs.check(backbone).errors.values()) <= 3e-5


DROPOUT = {
    "falcon": ("attention_dropout_rate", "feedforward_dropout_rate"),
    **dict.fromkeys("llama mistral qwen2 qwen3 opt phi3 bloom gpt_neo_x".split(), ("dropout",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DROPOUT))
def test_dropout_falls_where_it_does_upstream(rng, name):
    """The same layers drop out of tensors of the same shape, in training, as in the backbone."""
    backbone = ROWS[name].make(**dict.fromkeys(DROPOUT[name], 0.5))
    layers = [x for x in backbone._flatten_layers() if isinstance(x, keras.layers.Dropout)]
    opened, inputs = bs.open_backbone(backbone), tokens(rng, 2, 5)

    def dropped(model):
        seen = []
        with contextlib.ExitStack() as stack:
            for i, layer in enumerate(layers):
                note = functools.partial(lambda i, x: seen.append((i, x.shape)) or x, i)
                stack.enter_context(patched(layer, note))
            model(inputs, training=True)
        return sorted(seen)

    assert dropped(opened) == dropped(backbone) != []


@pytest.mark.slow
def test_kerashubs_own_gpt_neo_x_rotates_cached_queries_as_the_first_token(rng):
    """Why tests/test_family_table.py does not compare with its task: `task_is_right=False`."""
    backbone = ROWS["gpt_neo_x"].make()
    task = keras_hub.models.GPTNeoXCausalLM(backbone=backbone, preprocessor=None)
    inputs = tokens(rng, 2, 12)
    ids = inputs["token_ids"]
    wanted = np.asarray(backbone(inputs))[:, -1:]
    _, cache = task._build_cache(ids)
    _, hidden_states, _ = task.call_with_cache(ids[:, -1:], cache, 11)
    assert relative(hidden_states, wanted) > 1e-2
    got = run_chunks(bs.rewire(backbone), inputs, [11, 1])[0]
    assert relative(got[:, -1:], wanted) <= 3e-5


@pytest.mark.slow
def test_phi3_ends_where_its_short_frequencies_do(rng):
    backbone = ROWS["phi3"].make(**SU)
    opened, lm = bs.open_backbone(backbone), bs.CachedCausalLM(backbone)
    assert opened.max_positions == lm.max_positions == 24
    with pytest.raises(bs.SurgeryError, match="expected rows of at most 24 tokens"):
        opened.predict_on_batch(tokens(rng, 1, 25))
    with pytest.raises(bs.SurgeryError, match="expected at most 24 tokens in a row"):
        lm.generate(tokens(rng, 1, 20), max_new_tokens=5, stop_token_ids=None)
    assert bs.open_backbone(ROWS["phi3"].make()).max_positions is None


@pytest.fixture
def phi3_preprocessor():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "jumps over the lazy dog"]),
        model_writer=model,
        vocab_size=50,
        user_defined_symbols=["<|endoftext|>", "<|end|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = keras_hub.models.Phi3Tokenizer(model.getvalue())
    return keras_hub.models.Phi3CausalLMPreprocessor(tokenizer, sequence_length=32)


@pytest.mark.slow
def test_phi3_stops_at_the_end_of_a_turn_as_kerashub_does(phi3_preprocessor):
    tokenizer = phi3_preprocessor.tokenizer
    end, end_of_text = tokenizer.token_to_id("<|end|>"), tokenizer.end_token_id
    assert 0 < end != end_of_text
    backbone = ROWS["phi3"].make(vocabulary_size=tokenizer.vocabulary_size())
    tasks = [
        make(backbone=backbone, preprocessor=phi3_preprocessor)
        for make in (bs.CachedCausalLM, keras_hub.models.Phi3CausalLM)
    ]
    for task in tasks:
        task.compile(sampler="greedy")
    prompt = phi3_preprocessor.generate_preprocess(["the quick"], sequence_length=16)
    length = int(np.sum(prompt["padding_mask"]))
    plain = bs.CachedCausalLM(backbone)
    plain.compile(sampler="greedy")
    token = plain.generate(prompt, stop_token_ids=None)["token_ids"][0, length]
    head = backbone.token_embedding.reverse_embeddings
    columns = np.array(head)
    columns[:, [token, end]] = columns[:, [end, token]]
    head.assign(columns)  # what it gives first is now the end of a turn
    texts = [task.generate("the quick", max_length=16) for task in tasks]
    assert texts[0] == texts[1]
    longer = tasks[0].generate("the quick", max_length=16, stop_token_ids=(end_of_text,))
    assert len(longer) > len(texts[0])


@pytest.mark.slow
def test_a_rotary_layer_of_a_user_is_probed():
    """It may rotate as it likes, by no positions of rows."""

    class BySlot(keras_hub.layers.RotaryEmbedding):
        def call(self, x, start_index=0, positions=None):
            return super().call(x)

    rotary = BySlot(name="by_slot")

    def by_slot(layer, *args, **kwargs):
        own = isinstance(layer, keras_hub.layers.RotaryEmbedding)
        return rotary(*args, **kwargs) if own else layer(*args, **kwargs)

    model = bs.operate(ROWS["llama"].make(num_layers=1), [bs.Capture("blocks.0"), by_slot])
    with pytest.raises(bs.SurgeryError, match=r"'by_slot' \(BySlot\).*depends on other tokens"):
        bs.rewire(model)
