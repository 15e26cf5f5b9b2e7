"""A small set of real pictures, from a package: tiles of the photographs that scikit-image ships, a class for each photograph.

    python -m pip install --no-deps scikit-image
    python benchmarks/make_tiles.py --output data/tiles

writes `<output>/<photograph>/<row>_<column>.jpg`, 32 pixels a side. No two tiles overlap, so those that `convert images`
holds out share no pixel with those that train. scikit-image is not imported, only its files are read.
"""

from __future__ import annotations

import argparse
import importlib.util
import os

from PIL import Image

PHOTOGRAPHS = (
    'astronaut.png', 'brick.png', 'camera.png', 'chelsea.png', 'coffee.png', 'coins.png', 'grass.png', 'gravel.png',
    'hubble_deep_field.jpg', 'ihc.png', 'moon.png', 'motorcycle_left.png', 'retina.jpg', 'rocket.jpg',
)  # fmt: skip
# Of each photograph the middle is cut, so that none has many more tiles than the others.
_LARGEST_SIDE = 640


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--output', required=True, help='folder for a folder of tiles for each photograph')
    parser.add_argument('--side', type=int, default=32, help='height and width of a tile, in pixels (default: %(default)s)')
    args = parser.parse_args()
    package = importlib.util.find_spec('skimage')
    if package is None or not package.origin:
        parser.error('scikit-image, which ships the photographs, is not installed; run: pip install --no-deps scikit-image')
    count = 0
    for name in PHOTOGRAPHS:
        picture = Image.open(os.path.join(os.path.dirname(package.origin), 'data', name)).convert('RGB')
        folder = os.path.join(args.output, name.partition('.')[0])
        os.makedirs(folder, exist_ok=True)
        columns, rows = (min(length, _LARGEST_SIDE) // args.side for length in picture.size)
        left, top = ((length - number * args.side) // 2 for length, number in zip(picture.size, (columns, rows)))
        for row in range(rows):
            for column in range(columns):
                x, y = left + column * args.side, top + row * args.side
                tile = picture.crop((x, y, x + args.side, y + args.side))
                tile.save(os.path.join(folder, f'{row:02d}_{column:02d}.jpg'), quality=95)
        count += rows * columns
    print(f'{count} tiles of {len(PHOTOGRAPHS)} photographs in {args.output}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
