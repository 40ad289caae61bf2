"""The models that come with the package: where they are. Nothing of Keras is imported for that."""

import contextlib
import tomllib
from pathlib import Path


def bundled_models() -> dict[str, Path]:
    """Return the folder of each bundled model, by name."""
    folder = models_folder(Path(__file__).resolve().parent)
    inner = sorted(folder.iterdir()) if folder is not None else []
    return {path.name: path for path in inner if (path / "config.json").is_file()}


def models_folder(package: Path) -> Path | None:
    """Return the folder of bundled models: in an installed package, or beside one in a checkout.

    Args:
        package: the folder of the package. What lies beside it counts only where that is a checkout
            of this project: beside an installed package lie other people's.
    """
    if (package / "models").is_dir():
        return package / "models"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        project = tomllib.loads((package.parent / "pyproject.toml").read_text(encoding="utf-8"))
        if (
            project["project"]["name"] == "backbone-surgery"
            and (package.parent / "models").is_dir()
        ):
            return package.parent / "models"
    return None
