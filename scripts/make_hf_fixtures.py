"""Make the fixtures of `tests/opening/test_hf_parity.py`: tiny models and what they answer.

Each folder is a random GPT-2, Gemma, Gemma 2 or Qwen 3 saved by `transformers`, with a tokenizer of
its own, as a downloaded checkpoint would be. Beside it lie the logits and the greedy texts that
`transformers` gave, so that the tests need neither PyTorch nor `transformers`. This script does:

    pip install torch transformers sentencepiece protobuf typer
    python scripts/make_hf_fixtures.py --output tests/fixtures

The random weights are large, and so are norm scales and biases, so that every parameter has an
effect (but for GPT-2's key biases, which cancel in the softmax), the next token is seldom in doubt,
and texts do not fall into repeating one token. The script checks the latter two, and refuses
weights that would make a weak fixture.

`expected.npz` holds, for a few prompts of token ids of unequal length:
    token_ids int32[prompts, longest], padded on the right with zeros.
    lengths int32[prompts].
    logits float32[prompts, longest, vocabulary], each prompt run by itself.
    greedy int32[prompts, NEW_TOKENS], what follows when no token stops a row.
    stop_token_id int32[], and stopped_lengths int32[prompts], how many of the greedy tokens come
        out, the stop token included, where that token stops a row.
`expected.json` holds prompts of text, and each with its greedy continuation as text.
"""

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
import typer

PROMPT_LENGTHS = (2, 7, 11, 16)
NEW_TOKENS = 20
VOCABULARY_SIZE = 128
LARGEST_FOLDER = 300_000
END = "<|endoftext|>"

CORPUS = (
    "A girl named Lily had a red ball. She ran to the park with her dog.",
    "The fox sat by the river and the bear was asleep under a tree. It was a warm day!",
    "Tom wanted to eat a cake, but his mother said no. Then they shared it at the café.",
    "Once upon a time there was a bird that could not fly. The wind was so strong; it fell down.",
)
"""What the tokenizers are trained on. The one accent makes tokens that are parts of a character."""

TEXT_PROMPTS = ("The fox ran", "A girl had a ball. She", "the café was", " warm  day")


@dataclass(frozen=True)
class Recipe:
    """One fixture.

    Attributes:
        seed: of the weights and prompts.
        config: of the model.
        save_tokenizer: writes the tokenizer's files to a folder and returns it.
        embedding_scale: standard deviation of the token embedding.
        dtype: of the saved weights.
    """

    seed: int
    config: transformers.PretrainedConfig
    save_tokenizer: Callable[[Path], Any]
    embedding_scale: float
    dtype: torch.dtype = torch.float32


def train_byte_pairs(size: int) -> tokenizers.models.BPE:
    """Train a byte-pair model of so many tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.model


def save_gpt2_tokenizer(folder: Path) -> Any:
    """Train a byte-pair tokenizer whose end token comes last, as in the published GPT-2."""
    train_byte_pairs(VOCABULARY_SIZE - 1).save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary[END] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    return _reload(transformers.GPT2Tokenizer, folder)


def save_gemma_tokenizer(folder: Path) -> Any:
    """Train a SentencePiece model with the special tokens and options of the published Gemma."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=proto,
        vocab_size=VOCABULARY_SIZE,
        model_type="bpe",
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **{f"{name}_id": i for i, name in enumerate(("pad", "eos", "bos", "unk"))},
        **{f"{name}_piece": f"<{name}>" for name in ("pad", "eos", "bos", "unk")},
    )
    (folder / "tokenizer.model").write_bytes(proto.getvalue())
    return _reload(transformers.GemmaTokenizer, folder, add_bos_token=True, mask_token=None)


def save_qwen_tokenizer(folder: Path) -> Any:
    """Train a byte-pair tokenizer with special tokens of Qwen, saved as `tokenizer.json` alone."""
    with tempfile.TemporaryDirectory() as files:
        vocabulary, merges = train_byte_pairs(VOCABULARY_SIZE - 3).save(files)
        tokenizer = transformers.Qwen2Tokenizer(
            vocabulary,
            merges,
            eos_token="<|im_end|>",
            pad_token=END,
            extra_special_tokens=["<|im_start|>"],
        )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _reload(tokenizer_class: type, folder: Path, **kwargs: Any) -> Any:
    """Load a tokenizer from its files, and add the files that `transformers` saves."""
    tokenizer = tokenizer_class.from_pretrained(folder, **kwargs)
    tokenizer.save_pretrained(folder)
    # The path it was loaded from is of no use to others.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("vocab_file", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def gpt2_config() -> transformers.PretrainedConfig:
    """Return a GPT-2 config; KerasHub takes `n_inner` to be `4 * n_embd`."""
    return transformers.GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        bos_token_id=VOCABULARY_SIZE - 1,
        eos_token_id=VOCABULARY_SIZE - 1,
    )


def qwen3_config() -> transformers.PretrainedConfig:
    """Return a Qwen 3 config; KerasHub's norms of queries and keys have an epsilon of 1e-5."""
    return transformers.Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=VOCABULARY_SIZE - 3,
        pad_token_id=VOCABULARY_SIZE - 2,
    )


def gemma_config(config_class: type, **kwargs: Any) -> transformers.PretrainedConfig:
    """Return a Gemma config; KerasHub takes a rotary base of 10000 and an epsilon of 1e-6."""
    return config_class(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **kwargs,
    )


RECIPES = {
    "hf_gpt2": Recipe(105, gpt2_config(), save_gpt2_tokenizer, 0.15),
    "hf_gemma": Recipe(
        33,
        gemma_config(transformers.GemmaConfig, num_hidden_layers=3, head_dim=8),
        save_gemma_tokenizer,
        0.3,
    ),
    # The window is shorter than most prompts and both caps are low, so that all of them show.
    # The heads together are wider than the hidden states, as in the published Gemma.
    "hf_gemma2": Recipe(
        46,
        gemma_config(
            transformers.Gemma2Config,
            num_hidden_layers=4,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=2.0,
        ),
        save_gemma_tokenizer,
        0.1,
    ),
    "hf_qwen3": Recipe(6, qwen3_config(), save_qwen_tokenizer, 0.2, torch.float16),
}


def make_model(
    config: transformers.PretrainedConfig,
    seed: int,
    embedding_scale: float,
    auto_class: type = transformers.AutoModelForCausalLM,
) -> transformers.PreTrainedModel:
    """Make a model with large random weights, in float32."""
    generator = torch.Generator().manual_seed(seed)
    model = auto_class.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is embedding:
            scale = embedding_scale
        elif parameter.ndim > 1 and "wpe" not in name and "embed_positions" not in name:
            # GPT-2 stores its projections transposed, so the number of inputs comes first.
            inputs = parameter.shape[0 if config.model_type == "gpt2" else -1]
            scale = 2 / inputs**0.5
        else:
            scale = 0.3
        parameter.data.copy_(noise * scale + (parameter.data if parameter.ndim == 1 else 0))
    # The end token is made likely, so that some texts end by themselves.
    model.get_output_embeddings().weight.data[config.get_text_config().eos_token_id] *= 1.5
    return model


def load_model(folder: Path, attention: str = "eager", **kwargs: Any) -> Any:
    """Load a saved model in float32, with some values of its config changed."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32, **kwargs
    ).eval()


class Oracle:
    """A model of `transformers` to ask.

    Attributes:
        margin: how close the best two logits came, relative to the largest, in all answers.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.margin = float("inf")

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits of one prompt, float32[length, vocabulary]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0].numpy()
        best = np.sort(logits, axis=-1)
        margins = (best[:, -1] - best[:, -2]) / np.abs(logits).max()
        self.margin = min(self.margin, float(margins.min()))
        return logits

    def greedy(self, ids: list[int], eos_token_id: int | None) -> list[int]:
        """Return the greedy continuation of one prompt."""
        self.model.generation_config.eos_token_id = eos_token_id
        self.model.generation_config.pad_token_id = 0
        tokens = torch.tensor([ids])
        output = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )[0].tolist()
        self.logits(output)
        return output[len(ids) :]


def expect_arrays(seed: int, eos: int, oracle: Oracle) -> dict[str, np.ndarray]:
    """Return logits and greedy continuations of prompts of token ids."""
    rng = np.random.default_rng(seed)
    count, longest = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)
    token_ids = np.zeros((count, longest), np.int32)
    logits = np.zeros((count, longest, VOCABULARY_SIZE), np.float32)
    greedy, stopped_lengths = [], []
    for row, length in enumerate(PROMPT_LENGTHS):
        # Ids below 4 are Gemma's special tokens, the last one is GPT-2's.
        ids = rng.integers(4, VOCABULARY_SIZE - 1, length).tolist()
        token_ids[row, :length] = ids
        logits[row, :length] = oracle.logits(ids)
        greedy.append(oracle.greedy(ids, None))
        stopped_lengths.append(len(oracle.greedy(ids, eos)))
    return {
        "token_ids": token_ids,
        "lengths": np.array(PROMPT_LENGTHS, np.int32),
        "logits": logits,
        "greedy": np.array(greedy, np.int32),
        "stop_token_id": np.array(eos, np.int32),
        "stopped_lengths": np.array(stopped_lengths, np.int32),
    }


def expect_texts(oracle: Oracle, tokenizer: Any) -> list[dict[str, Any]]:
    """Return prompts of text with their greedy continuations, ended by the end token.

    The start token, if there is one, is put before each prompt: KerasHub does so, also for GPT-2.
    """
    texts = []
    for prompt in TEXT_PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = [*([tokenizer.bos_token_id] if tokenizer.bos_token else []), *ids]
        new = oracle.greedy(ids, tokenizer.eos_token_id)
        texts.append(
            {
                "prompt": prompt,
                "token_ids": ids + new,
                "new_tokens": len(new),
                "text": tokenizer.decode(ids + new, skip_special_tokens=True),
            }
        )
    return texts


def weaknesses(margin: float, arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, Any]]:
    """Yield what makes arrays a weak fixture: what is expected, and what there is."""
    variety = [len(set(row)) for row in arrays["greedy"].tolist()]
    lengths = arrays["stopped_lengths"].tolist()
    rules = (
        ("best two logits 3e-4 apart", margin > 3e-4, margin),
        ("6 different tokens in each row", min(variety) >= 6, variety),
        ("rows that stop early and rows that do not", _mixed(lengths), lengths),
    )
    yield from ((rule, received) for rule, holds, received in rules if not holds)


def check(
    name: str, margin: float, arrays: dict[str, np.ndarray], texts: list[dict], tokenizer: Any
) -> None:
    """Refuse a weak fixture."""
    text_lengths = [t["new_tokens"] for t in texts]
    # Libraries differ in how they show an unknown token. GPT-2 has none: it is its end token.
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    known = all(
        t["text"].startswith(t["prompt"]) and not unknown & set(t["token_ids"]) for t in texts
    )
    weak = list(weaknesses(margin, arrays))
    if not _mixed(text_lengths):
        weak.append(("texts that end early and texts that do not", text_lengths))
    if not known:
        weak.append(("texts without unknown tokens", texts))
    for rule, received in weak:
        raise ValueError(f"{name}: expected {rule}. Received {received}. Change its seed.")


def _mixed(lengths: list[int]) -> bool:
    return 1 < min(lengths) < NEW_TOKENS == max(lengths)


def make(name: str, recipe: Recipe, folder: Path) -> None:
    """Make one fixture in place of the one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = recipe.save_tokenizer(folder)
    if len(tokenizer) != VOCABULARY_SIZE:
        raise ValueError(
            f"{name}: expected a tokenizer of {VOCABULARY_SIZE} tokens. Received one of "
            f"{len(tokenizer)}. Change CORPUS or VOCABULARY_SIZE."
        )
    model = make_model(recipe.config, recipe.seed, recipe.embedding_scale)
    model.to(recipe.dtype).save_pretrained(folder)
    oracle = Oracle(load_model(folder))
    arrays = expect_arrays(recipe.seed, int(recipe.config.eos_token_id), oracle)
    texts = expect_texts(oracle, tokenizer)
    check(name, oracle.margin, arrays, texts, tokenizer)
    np.savez_compressed(folder / "expected.npz", **arrays)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    expected = {"made_with": versions, "max_new_tokens": NEW_TOKENS, "texts": texts}
    (folder / "expected.json").write_text(
        json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > LARGEST_FOLDER:
        raise ValueError(
            f"{name}: expected at most {LARGEST_FOLDER} bytes. Received {size}. Make it smaller."
        )
    typer.echo(f"{name}: {size} bytes, best two logits at least {oracle.margin:.1e} apart")


def main(
    output: Annotated[Path, typer.Option(help="Folder for the fixtures.")] = Path("tests/fixtures"),
) -> None:
    """Make every fixture."""
    torch.set_num_threads(1)
    for name, recipe in RECIPES.items():
        make(name, recipe, output / name)


if __name__ == "__main__":
    typer.run(main)
