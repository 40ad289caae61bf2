"""Write a model of Hugging Face as GGUF, by llama.cpp's own converter.

The folder needs no tokenizer: the file says how large the vocabulary is, and no more. The converter
and its version of `gguf` come from the sources of llama.cpp:

    PYTHONPATH=SOURCES/gguf-py:SOURCES python scripts/llama_cpp_convert.py FOLDER FILE
"""

from pathlib import Path
from typing import Annotated, Any

import gguf
import typer
from conversion import get_model_class
from conversion.base import ModelBase


def main(
    folder: Path,
    file: Path,
    kind_of_file: Annotated[str, typer.Option("--type", help="As `gguf` names it.")] = "ALL_F32",
) -> None:
    """Convert the model in a folder."""
    config = ModelBase.load_hparams(folder, is_mistral_format=False)
    kind: Any = get_model_class(config["architectures"][0])
    converter = kind(folder, gguf.LlamaFileType[kind_of_file], file)

    def name_the_size_alone() -> None:
        converter.gguf_writer.add_tokenizer_model("none")
        converter.gguf_writer.add_vocab_size(config["vocab_size"])

    converter.set_vocab = name_the_size_alone
    converter.write()


if __name__ == "__main__":
    typer.run(main)
