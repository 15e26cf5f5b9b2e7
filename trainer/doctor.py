"""`python -m trainer.doctor [flags as for a run]`: says whether a run with these flags would start, and if not, why.

Each check is a function of the examination (`checks.py`). Nothing is trained; the output folder is made and a file written to
it and removed.

Exit code: 0 when a run would start, 1 when it would not.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from trainer import checks, cluster, data_files, flags, storage, tuning
from trainer.checks import NotKnown, Subject
from trainer.config import ClusterConfig, Config
from trainer.errors import DataError, UsageError

# Clocks that differ by more break the order of checkpoints and events by time, and signed requests to Cloud Storage at 15 min.
MAX_CLOCK_SKEW_SECS = 60.0
# A checkpoint being written beside those that are kept; below this a run fails at its first save.
MIN_FREE_BYTES = 200 * 2**20
# No machine that has this package can be at an earlier time.
EARLIEST_SECS = 1.75e9
NVIDIA_DRIVER = '/proc/driver/nvidia/version'
_PACKAGES = ('tensorflow', 'tensorflow-cpu', 'tensorflow-estimator', 'tf-keras', 'keras', 'numpy', 'protobuf', 'tensorboard')


@dataclasses.dataclass
class Examination(Subject):
    """What is being looked at, and what earlier checks have established; None: not established."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    config: Optional[Config] = None
    cluster: Optional[cluster.Cluster] = None
    dataset: Any = None
    model_fn: Any = None
    output_dir: Optional[str] = None
    input_fns: dict[str, Any] = dataclasses.field(default_factory=dict)
    variables: Optional[dict[str, list[int]]] = None


def check_versions(exam: Examination) -> str:
    """Python, TensorFlow and the packages that must fit it."""
    from trainer import compat

    # Where Estimator is not TensorFlow's own it is imported at first use.
    assert compat.estimator.Estimator
    return f'Python {platform.python_version()}, ' + ', '.join(filter(None, map(_version, _PACKAGES)))


def check_devices(exam: Examination) -> str:
    """Processors that TensorFlow sees."""
    import tensorflow as tf

    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    # A user who wants the CPU says so by CUDA_VISIBLE_DEVICES.
    if 'GPU' not in kinds and 'CUDA_VISIBLE_DEVICES' not in exam.environ and os.path.exists(NVIDIA_DRIVER):
        raise DataError(
            'this machine has an NVIDIA driver, but TensorFlow sees no GPU and would train on the CPU; install '
            'tensorflow[and-cuda] of the same version, or set CUDA_VISIBLE_DEVICES= if that is meant'
        )
    return ', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))


def check_flags(exam: Examination) -> str:
    """The command line, and settings that contradict one another."""
    exam.config = flags.parse(exam.argv)
    return f'--mode={exam.config.run.mode}'


def check_cluster(exam: Examination) -> str:
    """The place of this process in its job."""
    cluster_flags = exam.config.cluster if exam.config else ClusterConfig()  # flags that are wrong have a line of their own
    exam.cluster = cluster.read_cluster(exam.environ, cluster_flags)
    trial = f', trial {exam.cluster.trial}' if exam.cluster.trial else ''
    return f'{exam.cluster.name} of {exam.cluster.num_workers} that train{trial}'


def check_output(exam: Examination) -> str:
    """The output folder: can be written, has room, and what is there already."""
    config, place = exam.need('config'), exam.need('cluster')
    folder = cluster.output_dir(config.run, place, exam.environ)
    storage.probe_writable(folder, cluster.output_flag(config.run, exam.environ))
    exam.output_dir = folder
    free = None if storage.is_remote(folder) else shutil.disk_usage(folder).free
    if free is not None and free < MIN_FREE_BYTES:
        raise DataError(
            f'{folder}: {free / 2**20:.0f} MB free; a run needs {MIN_FREE_BYTES / 2**20:.0f} MB at least for its checkpoints: '
            'make room or give another --output_path'
        )
    room = '' if free is None else f', {free / 2**30:.1f} GB free'
    return f'{folder} can be written{room}'


def check_clock(exam: Examination) -> str:
    """This machine's clock against that of the output folder's server, or against reason when it is the same machine."""
    folder = exam.need('output_dir')
    now = time.time()
    if now < EARLIEST_SECS:
        raise DataError(f'the clock says {time.ctime(now)}, before this package was made; set it (timedatectl set-ntp true)')
    probe = storage.join(folder, '.clock.tmp')
    storage.write_atomic(probe, b'')
    skew = storage.modified_secs(probe) - now
    storage.remove(probe)
    if abs(skew) > MAX_CLOCK_SKEW_SECS:
        raise DataError(f'the clock of {folder} is {skew:+.0f} s from this machine; set both by NTP (timedatectl set-ntp true)')
    newest = max((storage.modified_secs(path) for path in storage.glob(storage.join(folder, '*'))), default=0.0)
    if newest > now + MAX_CLOCK_SKEW_SECS:
        raise DataError(
            f'{folder} holds a file from {newest - now:.0f} s in the future: this clock, or that of the machine that wrote it, '
            'is wrong; set it by NTP (timedatectl set-ntp true)'
        )
    return time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(now))


def check_dataset(exam: Examination) -> str:
    """`--dataset`."""
    from trainer.datasets import get_dataset

    exam.dataset = get_dataset(exam.need('config').data)
    return f'{exam.dataset.name}: {", ".join(exam.dataset.schema.features)}; {exam.dataset.num_classes} classes'


def check_train_data(exam: Examination) -> str:
    """The training shards, and the first record against the schema."""
    return _check_data(exam, 'train_data_paths', training=True)


def check_eval_data(exam: Examination) -> str:
    """The evaluation shards, and the first record against the schema."""
    return _check_data(exam, 'eval_data_paths', training=False)


def check_model(exam: Examination) -> str:
    """`--model`: builds its training graph on a batch of the data."""
    import tensorflow as tf

    from trainer import checkpoints, compat

    config, input_fns = exam.need('config'), exam.input_fns
    run = _make_run(exam)
    if not input_fns:
        raise NotKnown('data')
    training = 'train_data_paths' in input_fns
    modes = compat.estimator.ModeKeys
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        iterator = tf.compat.v1.data.make_initializable_iterator(next(iter(input_fns.values()))({}))
        features, labels = iterator.get_next()
        run.model_fn(features, labels, modes.TRAIN if training else modes.EVAL, run.make_params())
        exam.variables = checkpoints.get_shapes()
        sizes = [variable.shape.num_elements() or 0 for variable in tf.compat.v1.trainable_variables()]
    return f'{config.model.model}: {sum(sizes):,} weights in {len(sizes)} variables'


def check_checkpoint(exam: Examination) -> str:
    """The checkpoint that the run would resume from: each variable there, in the shape that the model has."""
    from trainer import checkpoints

    folder, variables = exam.need('output_dir'), exam.need('variables')
    path = checkpoints.find_latest(folder)
    if path is None:
        return 'none: training starts at step 0'
    damage = checkpoints.find_damage(path)
    if damage:
        raise DataError(f'{damage}; a run would go on from the one before')
    checkpoints.check_fit(path, variables)
    return f'{path} fits the model'


def check_export(exam: Examination) -> str:
    """The signature of the export: builds the serving graph."""
    import tensorflow as tf

    from trainer import compat, export

    run = _make_run(exam)
    with tf.Graph().as_default():
        receiver = export.make_serving_input_receiver_fn(run.serving_dataset)()
        spec = run.model_fn(receiver.features, None, compat.estimator.ModeKeys.PREDICT, run.make_params())
        if not spec.export_outputs:
            raise UsageError(
                f'--model={run.config.model.model}: its PREDICT spec has no export_outputs, so nothing could be served'
            )
        inputs = ', '.join(f'{name} {_describe(tensor)}' for name, tensor in receiver.receiver_tensors.items())
        outputs = ', '.join(f'{name} {_describe(tensor)}' for name, tensor in spec.predictions.items())
    return f'{inputs} -> {outputs}'


def check_metric(exam: Examination) -> str:
    """The file of the metric report."""
    reporter = tuning.make_reporter(exam.need('config'), exam.need('cluster'), exam.environ)
    storage.probe_writable(os.path.dirname(reporter.path), tuning.METRIC_FILE)
    return f'{reporter.tag or "the first that the model has of " + ", ".join(tuning.DEFAULT_METRICS)} to {reporter.path}'


CHECKS: dict[str, Callable[[Examination], str]] = {
    'versions': check_versions,
    'devices': check_devices,
    'flags': check_flags,
    'cluster': check_cluster,
    'output': check_output,
    'clock': check_clock,
    'dataset': check_dataset,
    'training data': check_train_data,
    'evaluation data': check_eval_data,
    'model': check_model,
    'checkpoint': check_checkpoint,
    'export': check_export,
    'metric': check_metric,
}


def main(argv: Optional[Sequence[str]] = None, environ: Mapping[str, str] = os.environ) -> int:
    """Runs every check, prints a line for each, and returns the exit code."""
    from trainer.task import set_up_logs

    set_up_logs(debug=False, level=logging.WARNING)
    exam = Examination(sys.argv[1:] if argv is None else argv, environ)
    problems = checks.run(CHECKS, exam)
    print(f'\n{problems} problem{"s" * (problems != 1)}: ' + ('a run would not start' if problems else 'a run would start'))
    return 1 if problems else 0


def _check_data(exam: Examination, name: str, *, training: bool) -> str:
    from trainer import inputs

    config, dataset = exam.need('config'), exam.need('dataset')
    paths = getattr(config.data, name)
    if not paths:
        raise NotKnown(f'--{name}')
    input_fn = inputs.make_input_fn(
        data_files.resolve(paths, f'--{name}'),
        dataset,
        training=training,
        global_batch_size=config.data.batch_size if training else config.data.eval_batch_size,
        seed=config.run.seed,
        config=config.data,
    )
    exam.input_fns[name] = input_fn
    return f'{len(input_fn.files)} files, the first record is as {dataset.name} says'


def _make_run(exam: Examination) -> Any:
    """The Experiment of these flags: model and params as a run would have them."""
    from trainer.experiment import Experiment

    exam.need('output_dir')
    return Experiment(exam.need('config'), exam.need('cluster'), exam.environ)


def _describe(tensor: Any) -> str:
    return f'{tensor.dtype.name}{tensor.shape.as_list()}'.replace('None', 'batch')


def _version(package: str) -> str:
    try:
        return f'{package} {importlib.metadata.version(package)}'
    except importlib.metadata.PackageNotFoundError:
        return ''


if __name__ == '__main__':
    sys.exit(main())
