"""Make the fixture of `tests/generation/test_chat.py`: what `transformers` makes of conversations.

The folder holds a Qwen 3 without weights: a config, and a tokenizer that knows every byte, with a
chat template, as `transformers` saves them. `expected.json` holds conversations rendered by this
and other templates, as text and as token ids, with this tokenizer and with those of the folders
that `make_hf_fixtures.py` made. This script does it:

    pip install torch transformers sentencepiece protobuf typer
    python scripts/make_hf_chat_fixture.py --output tests/fixtures/hf_chat
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import transformers
import typer
from make_hf_fixtures import CORPUS, END, qwen3_config

VOCABULARY_SIZE = 300

QWEN = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

FEATURES = """
{% set state = namespace(turns=0) %}
{% for message in messages if message.role != "system" %}
    {% if loop.index0 == 3 %}
        {% break %}
    {% endif %}
    {% set state.turns = state.turns + 1 %}
{{ message.role }}: {{ message.content if message.content is string else message.content[0].text }}
    {% if message.role == "assistant" %}
        {% generation %}
            {% set end = "." %}
{{ end }}{{ eos_token }}
        {% endgeneration %}
    {% endif %}
    {% if message.note is defined %}
{{ {"note": message.note} | tojson }}
    {% endif %}
{% endfor %}
{{ state.turns }}{{ "!" if end is defined }}{{ bos_token is defined }}{{ tools is none }}
"""

STARTED = "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}"
BARE = "{% for m in messages %}{{ m.content }} {% endfor %}"

TURNS = [
    {"role": "system", "content": "The bear was a café."},
    {"role": "user", "content": "  The fox ran to <b> & 'so'  "},
    {"role": "assistant", "content": "A ball."},
    {"role": "user", "content": "and 1 < 22?\n\n She"},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "The fox"}], "note": None},
    {"role": "assistant", "content": "ran", "note": ["<b> & 'é'", 1]},
]

WORDS = [
    {"role": "user", "content": "The fox ran to the river; it was  so"},
    {"role": "assistant", "content": "A ball."},
]

CASES = [
    ("hf_chat", QWEN, TURNS, True),
    ("hf_chat", QWEN, TURNS, False),
    ("hf_chat", FEATURES, TURNS, True),
    ("hf_chat", FEATURES, PARTS, True),
    ("hf_gpt2", STARTED, WORDS, True),
    ("hf_gpt2", BARE, WORDS, True),
    ("hf_gemma", STARTED, WORDS, True),
    ("hf_gemma", BARE, WORDS, True),
]


def save_model(folder: Path) -> None:
    """Write the config and the tokenizer of a Qwen 3."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 3,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    with tempfile.TemporaryDirectory() as files:
        vocabulary, merges = tokenizer.model.save(files)
        saved = transformers.Qwen2Tokenizer(
            vocabulary,
            merges,
            eos_token="<|im_end|>",
            pad_token=END,
            extra_special_tokens=["<|im_start|>"],
        )
    saved.chat_template = QWEN
    saved.save_pretrained(folder)
    config = qwen3_config()
    config.vocab_size, config.architectures = VOCABULARY_SIZE, ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


def expect(folder: Path, template: str, messages: list[Any], generate: bool) -> dict[str, Any]:
    """Return one case."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"chat_template": template, "add_generation_prompt": generate}
    return {
        "folder": folder.name,
        "template": template,
        "messages": messages,
        "add_generation_prompt": generate,
        "text": tokenizer.apply_chat_template(messages, tokenize=False, **options),
        "token_ids": tokenizer.apply_chat_template(messages, return_dict=False, **options),
    }


def main(
    output: Annotated[Path, typer.Option(help="The folder.")] = Path("tests/fixtures/hf_chat"),
) -> None:
    """Make the folder in place of the one that is there."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    save_model(output)
    cases = [expect(output.parent / name, *rest) for name, *rest in CASES]
    document = {"made_with": {"transformers": transformers.__version__}, "cases": cases}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (output / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
