"""What a task has for files: presets with its edit inside, and checkpoints of its backbone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from backbone_surgery import byte_pairs
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation import chat
from backbone_surgery.opening.model import EditedBackbone
from backbone_surgery.opening.quantizing import check_saves
from backbone_surgery.presets import dtypes_of_layers, load_preset, preset_path
from backbone_surgery.recipes.preset import recipe_in, save_preset
from backbone_surgery.recipes.recipe import load_recipe
from backbone_surgery.recipes.store import read_document


def load_edited(
    preset: str, load_weights: bool = True, **kwargs: Any
) -> tuple[keras.Model | EditedBackbone, Any]:
    """Load the two parts of a task: a backbone, edited if the folder says so, and a preprocessor.

    Args:
        preset: see `Presets.from_preset`.
        load_weights: see there.
        **kwargs: see there.

    Returns:
        The backbone, and the preprocessor or `None`, whose tokenizer knows its chat template.

    Raises:
        SurgeryError: there is no such folder, or its edit does not fit what was asked for.
    """
    recipe = recipe_in(Path(preset_path(preset)))
    if recipe is not None and not load_weights:
        raise SurgeryError(
            f"from_preset at '{preset}': expected `load_weights=True`, since the folder holds "
            "an edit of these very weights. Received False. Load the base with KerasHub."
        )
    if recipe is not None:
        own = dtypes_of_layers(preset) or read_document(recipe)["base"]["dtype"]
        kwargs["dtype"] = _same_dtype(preset, own, kwargs.get("dtype"))
    backbone, preprocessor = load_preset(preset, load_weights, **kwargs)
    if recipe is not None:
        backbone = load_recipe(recipe, backbone)
    chat.load_chat(preprocessor, preset_path(preset))
    return backbone, preprocessor


def _same_dtype(preset: str, own: Any, wanted: Any) -> Any:
    """Return the dtype that an edit was made in; refuse another one that is asked for."""
    if wanted is None:
        return own
    name = wanted if isinstance(wanted, str) else getattr(wanted, "name", own)
    if isinstance(own, str) and name != own:
        raise SurgeryError(
            f"from_preset at '{preset}': expected {own}, the dtype that its edit was made in. "
            f"Received dtype {shown(wanted)}. Leave `dtype` out, or load the base by "
            "`keras_hub.models.Backbone.from_preset`, and edit that."
        )
    return wanted


class Presets:
    """A base of tasks over a backbone that may be edited."""

    backbone: keras.Model
    opened: EditedBackbone
    preprocessor: Any

    @classmethod
    def from_preset(
        cls,
        preset: str,
        load_weights: bool = True,
        trust: Iterable[Any] = (),
        precision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model: a bundled one by name, or any preset or folder that KerasHub can load.

        A folder that `save_to_preset` wrote holds the edit too, and the model comes back edited.

        Args:
            preset: `tiny_gpt2` or `tiny_gemma`; a KerasHub preset name or URL; or a folder in
                KerasHub or Hugging Face layout. A folder without a tokenizer gives a model
                without a preprocessor.
            load_weights: whether to load the weights, or start from random ones.
            trust: names of layers that the edit put in, to use without a probe; see `rewire`. An
                edit on disk never brings such a promise along.
            precision: see the class.
            **kwargs: such as `dtype`, for the backbone. An edited model gets the dtype that it was
                edited in, and no other.

        Raises:
            SurgeryError: there is no such folder, or its edit does not fit what was asked for.
        """
        parts = load_edited(preset, load_weights, **kwargs)
        return cls(*parts, trust=trust, precision=precision)  # type: ignore[call-arg]

    def save_to_preset(self, preset_dir: Any, max_shard_size: float | None = 10) -> None:
        """Save the base and preprocessor as a KerasHub preset, and the edit as a recipe inside.

        The chat template is saved beside them, in `chat_template.jinja`. The folder is written
        whole or not at all. KerasHub itself loads the base from it, as it is without the edit;
        `from_preset` of this class loads both.

        Args:
            preset_dir: path of the folder.
            max_shard_size: see KerasHub.

        Raises:
            SurgeryError: the edit has no description, see `save_recipe`, the backbone is
                quantised, or the folder holds something else.
        """
        save_preset(self.opened, self._save_text, preset_dir, max_shard_size)

    def _save_text(self, folder: Path) -> None:
        if self.preprocessor is not None:
            self.preprocessor.save_to_preset(str(folder))
            byte_pairs.save_pipeline(self.preprocessor.tokenizer, folder)
            chat.save_chat(self.preprocessor, folder)

    def get_config(self) -> dict[str, Any]:
        """As upstream, and what the tokenizer was repaired with, for archives of Keras."""
        config = super().get_config()  # type: ignore[misc]
        tokenizer = getattr(self.preprocessor, "tokenizer", None)
        pipeline = None if tokenizer is None else byte_pairs.pipeline_of(tokenizer)
        return config if pipeline is None else {**config, "tokenizer_pipeline": pipeline}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """As upstream, with the tokenizer repaired as it was."""
        config = dict(config)
        pipeline = config.pop("tokenizer_pipeline", None)
        lm = super().from_config(config)  # type: ignore[misc]
        if pipeline is not None:
            byte_pairs.repair(lm.preprocessor.tokenizer, pipeline)
        return lm

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save as Keras does, which cannot save an edit: `save_to_preset` can.

        Raises:
            SurgeryError: the backbone is edited, or quantised by GPTQ or AWQ.
        """
        check_saves(self.opened.owner)
        self.get_config()  # type: ignore[attr-defined]
        super().save(*args, **kwargs)  # type: ignore[misc]

    def save_weights(self, filepath: Any, **kwargs: Any) -> None:
        """Save the weights of the backbone, in its own format, whatever was edited.

        Raises:
            SurgeryError: the backbone is quantised by GPTQ or AWQ, which Keras does not save whole.
        """
        self.opened.save_weights(filepath, **kwargs)

    def load_weights(self, filepath: Any, **kwargs: Any) -> None:
        """Load a checkpoint of the backbone, whatever was edited.

        Raises:
            WeightMismatchError: see `EditedBackbone.load_weights`.
        """
        self.opened.load_weights(filepath, **kwargs)
