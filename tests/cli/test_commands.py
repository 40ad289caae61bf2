"""The command line, run as a user does."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import backbone_surgery as bs
from backbone_surgery.cli import steering
from backbone_surgery.cli.loading import load
from tests.adapters import write_adapter
from tests.cli.conftest import PROMPT


def test_generate_prints_one_text_for_each_prompt(run):
    result = run("generate", PROMPT, "Tom had a red ball.", "--max-new-tokens", "12")
    assert result.exit_code == 0
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(PROMPT)
    assert len(lines[0]) > len(PROMPT) + 10


@pytest.mark.slow
def test_an_adapter_of_peft(run, tmp_path):
    size = bs.CachedCausalLM.from_preset("tiny_gpt2").backbone.hidden_dim
    modules = {"transformer.h.1.attn.c_attn": (size, 3 * size)}
    folder = write_adapter(tmp_path / "lora", modules)
    args = ["generate", PROMPT, "--max-new-tokens", "12"]
    texts = [
        run(*args, "--adapter", f"tuned={folder}", "-c", f"tuned={strength}").stdout
        for strength in (0, 1)
    ]
    assert texts[0] == run(*args).stdout != texts[1]


@pytest.mark.slow
def test_response_formats(run, tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    schema = {
        "type": "object",
        "properties": {"pet": {"enum": ["dog", "cat"]}},
        "required": ["pet"],
    }
    (tmp_path / "pet.json").write_text(json.dumps(schema))
    formats = {
        "--regex": ("[0-9]{3}", bs.ResponseFormat("[0-9]{3}")),
        "--json-schema": (str(tmp_path / "pet.json"), bs.ResponseFormat.json_schema(schema)),
    }
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    for option, (value, wanted) in formats.items():
        text = lm.generate(PROMPT, response_format=wanted, max_new_tokens=30)
        asked = [option, value, "--max-new-tokens", "30"]
        assert run("generate", PROMPT, *asked).stdout.strip() == text
        assert run("generate", PROMPT, "--stream", *asked).stdout.strip() == text
        folder = tmp_path / option
        assert run("batch", str(tmp_path / "in.jsonl"), str(folder), *asked).exit_code == 0
        row = json.loads(next(folder.glob("*.jsonl")).read_text())
        assert text == PROMPT + row["generated"]
    felt = ["Lily lost her ball. She felt very", "--vector", "mood", "--regex", " (happy|sad)"]
    assert re.findall("happy|sad", run("steer", *felt).stdout) == ["sad", "sad", "happy"]
    swept = run("sweep", *felt, "--strengths", "-1,1").stdout
    assert re.findall("happy|sad", swept) == ["sad", "happy"]


@pytest.mark.slow
def test_a_penalty_against_repetition(run, tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    asked = {"max_new_tokens": 30, "penalties": bs.Penalties(1.3)}
    wanted = lm.generate(PROMPT, **asked)
    options = ["--max-new-tokens", "30", "--repetition-penalty", "1.3"]
    assert run("generate", PROMPT, *options).stdout.strip() == wanted
    assert run("generate", PROMPT, *options[:2]).stdout.strip() != wanted
    new = lm.generate(PROMPT, strip_prompt=True, **asked)
    steered = ["--vector", "mood", "--strengths", "0", *options]
    assert " ".join(new.split()) in plain(run("steer", PROMPT, *steered).stdout)
    sampled = ["--sampler", "greedy", *steered]
    assert " ".join(new.split()) in plain(run("sweep", PROMPT, *sampled).stdout)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    assert run("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *options).exit_code == 0
    (file,) = (tmp_path / "out").glob("*.jsonl")
    assert json.loads(file.read_text())["generated"] == new
    refused = run("generate", PROMPT, "--sampler", "beam", *options)
    assert "leave penalties out" in " ".join(refused.stderr.split())


def plain(table):
    """Return what stands in a table as one line."""
    return " ".join(re.sub("[\u2500-\u257f]", " ", table).split())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_plain_line(run, tmp_path):
    vector = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    file = tmp_path / "mood.gguf"
    bs.ControlVector(vector.directions, {"model_hint": "llama"}).save(file)
    steering = ["--vector", f"mood={file}", "-c", "mood=1"]
    result = run("generate", PROMPT, *steering, "--max-new-tokens", "1")
    assert result.exit_code == 0
    (line,) = [line for line in result.stderr.splitlines() if "warn" in line]
    assert line.startswith("warning: Steer at 'mood': the vector says that it was made for")


@pytest.mark.slow
def test_stream_prints_the_same_text(run):
    options = ["generate", PROMPT, "--max-new-tokens", "12", "--sampler", "top_p", "--seed", "4"]
    assert run(*options, "--stream").stdout.strip() == run(*options).stdout.strip()


@pytest.mark.slow
def test_inspect_shows_sites_parameters_and_cache(run):
    result = run("inspect", "--model", "tiny_gemma")
    assert result.exit_code == 0
    for word in (
        "gemma",
        "1,019,008",
        "bytes per token",
        "blocks.*.attention_pattern",
        "final_norm",
    ):
        assert word in result.stdout


def test_inspect_shows_whole_names_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    shown = run("inspect").stdout
    names = "".join(re.findall(r"│\s*\S*\s*│ (\S+)\s*│", shown))
    assert "blocks.*.attention_pattern" in names, shown


@pytest.mark.slow
@pytest.mark.usefixtures("graphviz")
def test_plot_writes_a_picture_and_mermaid(run, tmp_path):
    for name in ("model.mmd", "model.svg"):
        assert run("plot", str(tmp_path / name), "--expand").exit_code == 0
    assert (tmp_path / "model.mmd").read_text().startswith("flowchart TD")
    assert "cached_self_attention" in (tmp_path / "model.svg").read_text()


PAIRS = [
    {"positive": "Lily felt glad and smiled.", "negative": "Lily felt sad and cried."},
    {"positive": "Tom was a happy boy.", "negative": "Tom was an unhappy boy."},
    ["Mia laughed.", "Mia cried."],
]


@pytest.mark.slow
def test_train_then_steer_with_the_file(run, tmp_path):
    pairs, vector = tmp_path / "pairs.jsonl", tmp_path / "feeling.gguf"
    pairs.write_text("\n".join(json.dumps(p) for p in PAIRS))
    result = run("train-vector", str(pairs), str(vector), "--method", "mean_diff")
    assert result.exit_code == 0, result.output
    assert f"wrote {vector}: 3 pairs, mean_diff" in result.stdout.replace("\n", "")
    assert "block 0 is left out" in result.stderr.replace("\n", " ")
    options = ["--max-new-tokens", "20"]
    result = run("steer", PROMPT, "--vector", str(vector), "--strengths", "-3,0,3", *options)
    assert result.exit_code == 0, result.output
    for word in ("feeling at", "-3", " 0 ", "+3"):
        assert word in result.stdout
    plain = run("generate", PROMPT, *options).stdout
    same = run("generate", PROMPT, "--vector", str(vector), "-c", "feeling=0", *options).stdout
    other = run("generate", PROMPT, "-v", f"x={vector}", "-c", "x=4", *options).stdout
    assert plain == same != other


@pytest.mark.slow
def test_bundled_vectors_by_name(run):
    options = ["generate", PROMPT, "--max-new-tokens", "30"]
    texts = {s: run(*options, "--control", f"mood={s}").stdout for s in (-2, 0, 2)}
    assert len(set(texts.values())) == 3
    assert texts[0] == run(*options).stdout


@pytest.mark.slow
def test_sweep_counts_words_and_plots(run, tmp_path):
    prompts, picture = tmp_path / "prompts.txt", tmp_path / "out.png"
    prompts.write_text(f"{PROMPT}\n\nLong ago there lived a boy named Tom.\n")
    args = ["sweep", str(prompts), "--vector", "mood", "--strengths", "-1,1"]
    args += ["--max-new-tokens", "40", "--words", "happy,smiled,happily", "--plot", str(picture)]
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "4 texts" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_takes_empty_prompts_and_whole_lines(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("One\u2028prompt\x0chere\r\n\nanother\n".encode())
    wanted = ["One\u2028prompt\x0chere", "another", ""]
    assert steering._read_prompts([str(prompts), ""]) == wanted


@pytest.mark.slow
def test_lookup_writes_the_same_text(run):
    plain = run("generate", PROMPT, PROMPT[:20], "--max-new-tokens", "24")
    guessed = run("generate", PROMPT, PROMPT[:20], "--max-new-tokens", "24", "--lookup", "4")
    assert plain.exit_code == guessed.exit_code == 0, guessed.output
    assert guessed.stdout == plain.stdout
    refused = run("generate", PROMPT, "--lookup", "4", "--sampler", "beam")
    assert refused.exit_code == 2
    assert "lookup" in refused.output


@pytest.mark.skipif(bool(find_spec("jax_cuda12_plugin")), reason="its log cannot be turned off")
@pytest.mark.slow
def test_the_console_script_needs_no_configuration(tmp_path):
    """As on a fresh machine: no backend chosen, no Keras settings, and nothing else on screen."""
    script = Path(sysconfig.get_path("scripts")) / "backbone-surgery"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KERAS", "TF_"))}
    result = subprocess.run(
        [script, "generate", PROMPT, "--max-new-tokens", "5"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT)
    assert result.stderr == ""


@pytest.fixture(scope="module")
def edited_folder(tmp_path_factory):
    """A model with an edit and a chat template, as `save_to_preset` writes it."""
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    mood = bs.ControlVector.from_preset("tiny_gpt2", "mood")
    edited = bs.CachedCausalLM(
        bs.operate(lm.backbone, [bs.Steer("tone", mood, strength=-1.5)]), lm.preprocessor
    )
    edited.chat_template = "{{ messages[0]['content'] }}"
    path = tmp_path_factory.mktemp("edited") / "model"
    edited.save_to_preset(path)
    return path


@pytest.mark.slow
def test_a_folder_with_an_edit_comes_with_it(run, edited_folder):
    lm = bs.CachedCausalLM.from_preset(str(edited_folder))
    lm.compile(sampler="greedy")
    options = ["--model", edited_folder, "--max-new-tokens", "20"]
    for controls, more in ({}, []), ({"tone": 0.5}, ["--control", "tone=0.5"]):
        result = run("generate", PROMPT, *options, *more)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == lm.generate(PROMPT, max_new_tokens=20, controls=controls)
    plain = run("generate", PROMPT, "--max-new-tokens", "20")
    assert run("generate", PROMPT, *options).stdout != plain.stdout


@pytest.mark.slow
def test_a_folder_with_an_edit_takes_no_other(edited_folder):
    with pytest.raises(bs.SurgeryError, match=r"--recipe at .* without an edit of its own"):
        load(str(edited_folder), recipe=edited_folder / "recipe")


@pytest.mark.slow
@pytest.mark.parametrize("is_recipe", [False, True])
def test_a_vector_takes_no_name_of_the_edit(edited_folder, is_recipe):
    model, recipe = str(edited_folder), None
    if is_recipe:
        model, recipe = "tiny_gpt2", edited_folder / "recipe"
    words = r"--vector at 'tone': expected .* of one in the edit of --{} '.*--vector other=mood"
    with pytest.raises(bs.SurgeryError, match=words.format("recipe" if is_recipe else "model")):
        load(model, {"tone": "mood"}, recipe=recipe)


@pytest.mark.slow
def test_the_chat_template_of_a_folder_is_loaded(edited_folder):
    assert load(str(edited_folder)).chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.slow
def test_strengths_of_a_control_of_the_edit_of_a_model_are_compared(run, edited_folder):
    """The texts are those of `generate` with the same strengths."""
    steering = ["--control", "tone", "--strengths", "-2,2", "--max-new-tokens", "8"]
    compared = run("steer", PROMPT, "-m", edited_folder, *steering)
    assert compared.exit_code == 0, compared.output
    for strength in (-2, 2):
        options = ["-m", edited_folder, "-c", f"tone={strength}", "--max-new-tokens", "8"]
        text = run("generate", PROMPT, *options).stdout.strip().removeprefix(PROMPT).strip()
        assert text in " ".join(compared.stdout.split())
    assert run("steer", PROMPT, "-c", "mood", *steering[2:]).exit_code == 0


@pytest.mark.slow
def test_a_mistyped_control_of_an_edit_is_told_the_one_there_is(run, edited_folder):
    wrong = run("generate", PROMPT, "-m", edited_folder, "-c", "tonee=1")
    assert wrong.exit_code == 2
    assert "Did you mean 'tone'?" in wrong.output


def test_an_interrupted_command_ends_while_it_imports():
    words = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *others):\n"
        "        if name == 'keras_hub': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv[0] = 'backbone-surgery'; from backbone_surgery import cli"
    )
    command = [sys.executable, "-c", words, "generate", "Once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGINT
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_interrupted_command_ends_at_once_with_what_it_wrote():
    """Without the tear-down of Python, in which a program that still runs could crash."""
    words = (
        "import atexit; from backbone_surgery import cli\n"
        "@cli.app.command()\n"
        "def wait(): print('begun'); raise KeyboardInterrupt\n"
        "atexit.register(print, 'torn down'); cli.main()"
    )
    command = [sys.executable, "-c", words, "wait"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, "begun\n"), done.stderr


@pytest.mark.slow
def test_an_interrupted_command_ends_while_a_compiled_program_runs():
    """Python would hear of the signal only when the program is done."""
    words = (
        # A shell's background job ignores the signal, and so would what it starts.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import jax, numpy; from backbone_surgery import cli\n"
        "count = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 1, lambda x: -x, x))\n"
        "@cli.app.command()\n"
        "def wait(): print('begun', flush=True); numpy.asarray(count(0))\n"
        "cli.main()"
    )
    command = [sys.executable, "-c", words, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()


@pytest.mark.slow
def test_a_command_whose_reader_leaves_ends_quietly():
    """As behind `| head`."""
    words = (
        "from backbone_surgery import cli\n"
        "def wait():\n"
        "    while True: cli.console.write('begun')\n"
        "cli.app.command()(cli.plain_errors(wait)); cli.main()"
    )
    command = [sys.executable, "-c", words, "wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert "BrokenPipe" not in errors, errors
    assert process.returncode == 1
