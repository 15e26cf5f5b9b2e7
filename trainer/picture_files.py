"""One picture file of any kind to the JPEG that a record holds, with Pillow.

What is a JPEG of 8-bit grey or RGB already, upright and of the size asked for, is stored as it is, after a look at all of it.
Everything else (PNG, WebP, CMYK, 16 bits, turned by its EXIF orientation, to be resized) is decoded and written as JPEG;
what is transparent becomes white, and of an animation the first picture counts.
"""

from __future__ import annotations

import io
import warnings
from typing import Any, NamedTuple

from trainer.errors import DataError

_JPEG = b'\xff\xd8'
_JPEG_END = b'\xff\xd9'
_EXIF_ORIENTATION = 0x0112
_MAX_PIXELS = 100_000_000


class Picture(NamedTuple):
    """A picture as it is stored."""

    jpeg: bytes
    width: int
    height: int
    is_unchanged: bool
    """Whether `jpeg` is the file as it was."""


def read_picture(data: bytes, *, resize: int = 0, crop: bool = False, quality: int = 95) -> Picture:
    """Returns the picture of a file.

    Args:
      data: The file.
      resize: The shorter side becomes this many pixels, unless it is shorter already; 0 leaves all sizes.
      crop: Cuts to the central square; with `resize` all pictures then have this very size, small ones enlarged.
      quality: Of the JPEGs written, 1 to 95.

    Raises:
      DataError: It cannot be decoded, or has over 100 million pixels; says why in a few words.
    """
    if not data:
        raise DataError('the file is empty')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # broken EXIF data and the like do no harm to the pixels
            return _convert(data, resize=resize, crop=crop, quality=quality)
    except DataError:
        raise
    # Pillow's decoders raise whatever comes up in a damaged file: OSError, SyntaxError, ValueError, struct.error ...
    except Exception as error:
        raise DataError(' '.join(str(error).split())[:160] or type(error).__name__) from error


def _convert(data: bytes, *, resize: int, crop: bool, quality: int) -> Picture:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        if opened.width * opened.height > _MAX_PIXELS:
            raise DataError(f'{opened.width} x {opened.height} pixels are more than {_MAX_PIXELS:,}')
        size = _target_size(opened.size, resize=resize, crop=crop)
        is_upright = opened.getexif().get(_EXIF_ORIENTATION, 1) == 1
        is_plain = opened.format == 'JPEG' and opened.mode in ('RGB', 'L') and is_upright
        if is_plain and size == opened.size:
            _check_whole(data)
            # Decoding at an eighth reads all of the file, but does a fraction of the arithmetic.
            opened.draft(None, (max(1, opened.width // 8), max(1, opened.height // 8)))
            opened.load()
            return Picture(data, size[0], size[1], is_unchanged=True)
        if opened.format == 'JPEG':
            _check_whole(data)
            if resize:
                opened.draft(None, (2 * size[0], 2 * size[1]))
        image = _to_rgb(opened)
    if not is_upright:
        image = _turn_upright(image, opened)
        size = _target_size(size=image.size, resize=resize, crop=crop)
    image = _fit(image, size, crop=crop)
    stream = io.BytesIO()
    image.save(stream, 'JPEG', quality=quality)
    return Picture(stream.getvalue(), image.width, image.height, is_unchanged=False)


def _check_whole(data: bytes) -> None:
    """Pillow and libjpeg fill the rest of a cut JPEG with grey when only its last bytes are missing."""
    if _JPEG_END not in data[-4096:]:
        raise DataError('the JPEG is cut: its end marker is missing')


def _target_size(size: tuple[int, int], *, resize: int, crop: bool) -> tuple[int, int]:
    """(width, height) to store; of a draft, whose scale is whole, only the proportions count."""
    width, height = size
    if crop:
        side = resize or min(size)
        return side, side
    if not resize or min(size) <= resize:
        return size
    scale = resize / min(size)
    return max(resize, round(width * scale)), max(resize, round(height * scale))


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith('I') or image.mode == 'F':
        return _from_deep_grey(image).convert('RGB')
    if image.mode in ('RGBA', 'LA', 'PA', 'RGBa', 'La') or 'transparency' in image.info:
        image = image.convert('RGBA')
        return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image).convert('RGB')
    return image.convert('RGB')


def _from_deep_grey(image: Any) -> Any:
    """Grey of 16 bits to 8: Pillow's own conversion cuts everything above 255."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    if values.dtype.kind == 'f':  # has no range of its own
        low, high = float(values.min()), float(values.max())
        return Image.fromarray(((values - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8))
    return Image.fromarray((np.clip(values, 0, 65535) // 257).astype(np.uint8))


def _turn_upright(image: Any, original: Any) -> Any:
    # Not ImageOps.exif_transpose: it writes the EXIF data anew, and fails where they are damaged elsewhere.
    from PIL import Image

    turns = {
        2: (Image.Transpose.FLIP_LEFT_RIGHT,),
        3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,),
        5: (Image.Transpose.TRANSPOSE,),
        6: (Image.Transpose.ROTATE_270,),
        7: (Image.Transpose.TRANSVERSE,),
        8: (Image.Transpose.ROTATE_90,),
    }
    for turn in turns.get(original.getexif().get(_EXIF_ORIENTATION, 1), ()):
        image = image.transpose(turn)
    return image


def _fit(image: Any, size: tuple[int, int], *, crop: bool) -> Any:
    """Resizes, antialiased, the whole of the image or its central square."""
    from PIL import Image

    box = (0.0, 0.0, float(image.width), float(image.height))
    if crop:
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
