"""The models by name, and how one's own is found: `package.module:function`."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any, Callable

from trainer import plugins
from trainer.datasets import Dataset
from trainer.errors import UsageError
from trainer.models import convnet, dcgan, keras_network, mlp, premade, resnet

ModelFn = Callable[..., Any]

MODELS: dict[str, ModelFn] = {
    'mlp': mlp.model_fn,
    'convnet': convnet.model_fn,
    'resnet50': resnet.model_fn,
    'dcgan': dcgan.model_fn,
    'linear': premade.linear_model_fn,
    'dnn': premade.dnn_model_fn,
    'wide_deep': premade.wide_deep_model_fn,
}

# What a model is given when it serves or predicts, where that is not a record of its dataset.
_SERVING_DATASETS: dict[str, Callable[[Dataset], Dataset]] = {'dcgan': dcgan.make_serving_dataset}


def get_serving_dataset(spec: str, dataset: Dataset) -> Dataset:
    """Returns the dataset whose records an export and `--mode=predict` take.

    Args:
      spec: of `--model`.
      dataset: of `--dataset`.
    """
    return _SERVING_DATASETS[spec](dataset) if spec in _SERVING_DATASETS else dataset


def get_model(spec: str) -> ModelFn:
    """Returns the model_fn that `--model` names.

    Args:
      spec: a key of MODELS, or 'package.module:function'. The function is a model_fn, `(features, labels, mode, params)`, or it
        builds a Keras model from `(params)`.

    Raises:
      UsageError: there is none of this name, or its arguments are neither of the two.
    """
    if spec in MODELS:
        return MODELS[spec]
    if ':' not in spec:
        raise UsageError(f'--model={spec}: expected one of {", ".join(MODELS)}, or package.module:function of your own')
    module, function = plugins.load(spec, '--model')
    if function is None:
        raise UsageError(f'--model={spec}: module {module.__name__} has no {spec.partition(":")[2]}')
    if not callable(function):
        raise UsageError(f'--model={spec}: expected a function, it is a {type(function).__name__}')
    arguments = list(inspect.signature(function).parameters)
    if arguments[:4] == ['features', 'labels', 'mode', 'params']:
        return function
    if arguments == ['params']:
        return functools.partial(keras_network.model_fn, function)
    raise UsageError(
        f'--model={spec}: expected a model_fn(features, labels, mode, params) or a function(params) that returns a Keras '
        f'model, it takes ({", ".join(arguments)})'
    )


def parse_model_params(text: str) -> Mapping[str, Any]:
    """Returns the settings of `--model_params`: 'name=value,name=value' or a JSON object; numbers and booleans become such.

    Raises:
      UsageError: the text is neither.
    """
    if not text.strip():
        return {}
    try:
        if text.lstrip().startswith('{'):
            return dict(json.loads(text))
        pairs = [item.split('=', 1) for item in text.split(',')]
        return {name.strip(): _parse_value(value.strip()) for name, value in pairs}
    except ValueError as error:
        raise UsageError(f'--model_params={text}: expected name=value,name=value or a JSON object ({error})') from None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
