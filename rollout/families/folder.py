"""Where a model's files are: a folder in diffusers layout, or a hub id that is fetched into the
hub's cache."""

import json
from pathlib import Path
from typing import Any

MODEL_INDEX = "model_index.json"


def pipeline_folder(path: str, pipeline_class: Any) -> Path:
    """Return the local folder of the model that ModelConfig.path names.

    `pipeline_class.download` fetches a hub id ("owner/name"). Raises ValueError when the folder is
    missing, isn't in diffusers layout, or holds another pipeline than `pipeline_class`.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = _download(path, pipeline_class)
    if not (folder / MODEL_INDEX).is_file():
        raise ValueError(
            f"model.path = {path!r} has no {MODEL_INDEX}: not a model in diffusers layout; "
            "give the folder that a pipeline's save_pretrained wrote"
        )
    found = model_index(folder).get("_class_name")
    if found != pipeline_class.__name__:
        raise ValueError(
            f"model.path = {path!r} holds a {found}, not a {pipeline_class.__name__}; "
            "set model.family to match"
        )
    return folder


def model_index(folder: Path) -> dict[str, Any]:
    """Read the pipeline's table of components: name -> [library, class], [None, None] where there
    is none."""
    return json.loads((folder / MODEL_INDEX).read_text())


def lacks(folder: Path, component: str) -> bool:
    """Whether the pipeline in `folder` comes without `component`: not listed, listed as null, or no
    such folder."""
    entry = model_index(folder).get(component)
    return entry is None or entry[0] is None or not (folder / component).is_dir()


def _download(path: str, pipeline_class: Any) -> Path:
    owner, _, name = path.partition("/")
    looks_like_hub_id = bool(owner and name) and "/" not in name and not Path(owner).exists()
    if not looks_like_hub_id or owner.startswith((".", "~")):
        raise ValueError(
            f"model.path = {path!r}: no such folder (looked in {Path(path).absolute()}); give a "
            "folder in diffusers layout, by a path that every node can read, "
            "or a hub id 'owner/name'"
        )
    try:
        return Path(pipeline_class.download(path))
    except OSError as error:
        raise ValueError(
            f"model.path = {path!r} is neither a folder nor a hub id that could be fetched: {error}"
        ) from error
