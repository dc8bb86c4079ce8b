"""Image grids with captions, for people who want to look rather than read numbers.

Images are uint8 arrays [H, W, 3]. Small ones are enlarged without smoothing, so that a pixel stays
a pixel.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cluster.run_folder import EVALUATION, evaluation_picture, trajectory_picture
from rollout.trajectory import read_group, read_previews

FONT_SIZE = 12
LINE_HEIGHT = 15
MARGIN = 8
CELL_WIDTH = 128
"""Images narrower than this are enlarged to about it, so that a caption fits below."""
PAPER, INK = (255, 255, 255), (40, 40, 40)


def grid(
    images: np.ndarray | Sequence[np.ndarray],
    captions: Sequence[str] = (),
    *,
    num_columns: int | None = None,
    scale: int | None = None,
) -> Image.Image:
    """Rows of equally large images, each with its caption below.

    `images` is [R, C, H, W, 3], which fixes the columns, or a list (or [n, H, W, 3]), which goes
    into `num_columns`, by default about a square. Captions run along the rows.
    """
    images = np.asarray(images)
    if images.ndim == 5:
        num_columns, images = images.shape[1], images.reshape(-1, *images.shape[2:])
    _check(images, captions)
    num_columns = min(num_columns or math.ceil(math.sqrt(len(images))), len(images))
    scale = scale or _scale(images.shape[2])
    cells = [enlarge(image, scale) for image in images]
    return _lay_out(cells, [[caption] for caption in captions], num_columns)


def before_after(
    before: np.ndarray | Sequence[np.ndarray],
    after: np.ndarray | Sequence[np.ndarray],
    prompts: Sequence[str],
    scores: Sequence[tuple[float, float]] = (),
    *,
    num_columns: int = 4,
    scale: int | None = None,
) -> Image.Image:
    """Pairs side by side, before on the left; below each its scores and its prompt."""
    before, after = np.asarray(before), np.asarray(after)
    if before.shape != after.shape:
        raise ValueError(f"before {before.shape} and after {after.shape} do not pair")
    _check(before, prompts)
    scale = scale or _scale(before.shape[2])
    pairs = [
        _beside(enlarge(old, scale), enlarge(new, scale))
        for old, new in zip(before, after, strict=True)
    ]
    captions = [[prompt] for prompt in prompts]
    for caption, (old, new) in zip(captions, scores, strict=bool(scores)):
        caption.insert(0, f"before {old:.2f}, after {new:.2f}")
    return _lay_out(pairs, captions, min(num_columns, len(pairs)))


def trajectory_strip(
    previews: np.ndarray | Sequence[np.ndarray],
    reward_values: Sequence[float | None],
    *,
    states: Sequence[int] | None = None,
    prompt: str = "",
    scale: int | None = None,
) -> Image.Image:
    """The clean estimates of one trajectory, noise on the left, each with state and reward below.

    `states` numbers the previews where not every state has one; a reward that was not computed is
    none.
    """
    previews = np.asarray(previews)
    _check(previews, [str(reward) for reward in reward_values])
    states = range(len(previews)) if states is None else states
    captions = [
        [f"state {state}", "not scored" if reward is None else f"reward {reward:.3f}"]
        for state, reward in zip(states, reward_values, strict=True)
    ]
    scale = scale or _scale(previews.shape[2])
    cells = [enlarge(preview, scale) for preview in previews]
    return _lay_out(cells, captions, len(cells), title=prompt)


def write_trajectory_picture(run_dir: Path, iteration: int, batch: Any) -> None:
    """Keep a picture of a sealed group's first trajectory, previews and rewards step by step, if it has previews."""
    pngs = read_previews(batch)[0]
    if pngs is None:
        return
    group = read_group(batch)
    states = [state for state, png in enumerate(pngs) if png is not None]
    previews = [np.asarray(Image.open(io.BytesIO(pngs[state] or b""))) for state in states]
    path = trajectory_picture(run_dir, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [float(group.rewards[0][state]) for state in states]
    trajectory_strip(previews, values, states=states, prompt=group.prompt).save(path)


def write_evaluation_pictures(
    run_dir: Path,
    name: str,
    images: np.ndarray | Sequence[np.ndarray],
    indexes: Sequence[int],
    captions: Sequence[str],
) -> None:
    """Keep some images of the evaluation `name` (before | after): each at its own size, and a grid.

    `indexes` are the lines the images belong to; the report pairs before and after by them.
    """
    for index, image in zip(indexes, images, strict=True):
        path = evaluation_picture(run_dir, name, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    grid(images, captions, num_columns=6).save(run_dir / EVALUATION / f"{name}.png")


def enlarge(image: np.ndarray, scale: int) -> Image.Image:
    """The image, `scale` times as wide and high, every pixel a square."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    size = (picture.width * scale, picture.height * scale)
    return picture.resize(size, Image.Resampling.NEAREST)


def wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Lines of at most `width` pixels, broken at spaces; a word that is longer stays whole."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _check(images: np.ndarray, captions: Sequence[str]) -> None:
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or not len(images):
        raise ValueError(
            f"a picture needs uint8 images [n, H, W, 3], got {images.dtype} {list(images.shape)}"
        )
    if captions and len(captions) != len(images):
        raise ValueError(f"{len(images)} images and {len(captions)} captions do not match")


def _scale(width: int) -> int:
    return max(1, round(CELL_WIDTH / width))


def _beside(left: Image.Image, right: Image.Image) -> Image.Image:
    pair = Image.new("RGB", (left.width + right.width + 2, left.height), PAPER)
    pair.paste(left, (0, 0))
    pair.paste(right, (left.width + 2, 0))
    return pair


def _lay_out(
    cells: Sequence[Image.Image],
    captions: Sequence[Sequence[str]],
    num_columns: int,
    title: str = "",
) -> Image.Image:
    """Cells along rows; the caption paragraphs of each wrapped below it, rows equally high."""
    font = ImageFont.load_default(FONT_SIZE)
    width, height = cells[0].size
    texts = [[line for part in caption for line in wrap(part, width, font)] for caption in captions]
    text_height = LINE_HEIGHT * max((len(text) for text in texts), default=0)
    step_x, step_y = width + MARGIN, height + text_height + MARGIN + (MARGIN if texts else 0)
    num_rows = math.ceil(len(cells) / num_columns)
    total_width = num_columns * step_x + MARGIN
    heading = wrap(title, total_width - 2 * MARGIN, font)
    top = MARGIN + len(heading) * LINE_HEIGHT + (MARGIN if heading else 0)
    page = Image.new("RGB", (total_width, num_rows * step_y + top), PAPER)
    draw = ImageDraw.Draw(page)
    _write(draw, (MARGIN, MARGIN), heading, font)
    for number, cell in enumerate(cells):
        row, column = divmod(number, num_columns)
        x, y = MARGIN + column * step_x, top + row * step_y
        page.paste(cell, (x, y))
        if texts:
            _write(draw, (x, y + height + 3), texts[number], font)
    return page


def _write(
    draw: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    lines: Sequence[str],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    for number, line in enumerate(lines):
        draw.text((corner[0], corner[1] + number * LINE_HEIGHT), line, fill=INK, font=font)
