"""Helpers of programs that prepare images themselves; our own way is `verl.utils.dataset.media`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.utils.dataset.media import load_image, load_video
from verl.utils.media import Media, rope_positions

IMAGE_TOKEN = "<|image_pad|>"


def process_image(image: Any, image_patch_size: int = 14) -> Any:
    """An RGB image from an image, its bytes, a path, a `data:` URL or a mapping with one of them.

    It keeps its size: the model's processor, which knows its patches, fits it to them.
    """
    return load_image(image.get("image", image) if isinstance(image, dict) else image)


def process_video(
    video: Any, image_patch_size: int = 14, nframes: int | None = None, fps: float | None = None
) -> Tensor:
    """The frames of a video given as frames, (frames, 3, height, width) in 0 to 255."""
    part = dict(video) if isinstance(video, dict) else {"video": video}
    rate = fps if fps is not None else part.get("fps")
    if rate is not None:
        raise ValueError(
            f"fps is {rate}; frames have no times here: choose with nframes how many are taken"
        )
    frames = load_video({**part, "nframes": nframes or part.get("nframes")})
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise ValueError(f"the frames of a video have {len(sizes)} sizes: {sorted(sizes)[:3]}")
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)


def get_rope_index(
    processor: Any,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Positions of a sequence in time, height and width, (3, tokens); 1 where it is masked.

    `image_grid_thw` has the patches of each image, in the order of the images.
    """
    if video_grid_thw is not None and len(video_grid_thw):
        raise ValueError(
            f"video_grid_thw has {len(video_grid_thw)} videos; models get the frames of a video as "
            "images here"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ids = input_ids[mask.bool()].cpu().numpy()
    merge = int(processor.image_processor.merge_size)
    image_id = processor.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    (places,) = np.nonzero(ids == image_id)
    media, start = [], 0
    for t, h, w in [] if image_grid_thw is None else image_grid_thw.tolist():
        grid = (t, h // merge, w // merge)
        own = places[start : start + grid[0] * grid[1] * grid[2]]
        media.append(Media(kind="image", content_hash="", inputs={}, places=own, grid=grid))
        start += grid[0] * grid[1] * grid[2]
    if start != len(places):
        raise ValueError(
            f"the sequence has {len(places)} image tokens and image_grid_thw stands for {start}"
        )
    found = rope_positions(len(ids), media)
    found = np.broadcast_to(np.arange(len(ids)), (3, len(ids))) if found is None else found
    positions = torch.ones((3, len(input_ids)), dtype=torch.long, device=input_ids.device)
    positions[:, mask.bool()] = torch.from_numpy(np.ascontiguousarray(found)).to(input_ids.device)
    return positions
