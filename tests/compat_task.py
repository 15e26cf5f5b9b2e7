"""One task of a small Estimator job, run as a process of its own; prints what it got as one line of JSON.

    python -m tests.compat_task KIND MODEL_DIR

KIND is one of `tpu_estimator`, `mirrored`, `multi_worker`, `parameter_server`; the last two read TF_CONFIG. The job is
a linear regression on four fixed rows from zero weights: its losses can be worked out by hand.
"""

from __future__ import annotations

import functools
import json
import os
import sys

import numpy as np
import tensorflow as tf

from trainer import compat

STEPS = 6
LEARNING_RATE = 0.1
X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]], np.float32)
Y = np.array([[1.0], [2.0], [3.0], [0.0]], np.float32)

estimator = compat.estimator
losses: list[float] = []


def train_input_fn(params=None):
    del params
    return tf.data.Dataset.from_tensor_slices(({'x': X}, Y)).repeat().batch(len(X), drop_remainder=True)


def eval_input_fn(params=None):
    del params
    return tf.data.Dataset.from_tensors(({'x': X}, Y))


def serving_input_receiver_fn():
    x = tf.compat.v1.placeholder(tf.float32, [None, 2])
    return estimator.export.ServingInputReceiver({'x': x}, {'x': x})


def write_loss(step, loss, model_dir):
    """The host_call: a scalar summary a step, under MODEL_DIR/host."""
    writer = tf.summary.create_file_writer(os.path.join(model_dir, 'host'))
    with writer.as_default(), tf.summary.record_if(True):
        tf.summary.scalar('host_loss', loss[0], step=tf.cast(step[0], tf.int64))
        return tf.compat.v1.summary.all_v2_summary_ops()


def model_fn(features, labels, mode, params):
    # A Keras layer in graph mode, as in users' models.
    outputs = compat.keras.layers.Dense(1, kernel_initializer='zeros', name='dense')(features['x'])
    is_tpu = 'host_dir' in params
    spec = estimator.tpu.TPUEstimatorSpec if is_tpu else estimator.EstimatorSpec
    if mode == estimator.ModeKeys.PREDICT:
        exports = {'serving_default': estimator.export.PredictOutput({'y': outputs})}
        return spec(mode, predictions={'y': outputs}, export_outputs=exports)
    loss = tf.reduce_mean(tf.square(outputs - labels))
    if mode == estimator.ModeKeys.EVAL:
        return spec(mode, loss=loss)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE)
    train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_or_create_global_step())
    record = estimator.LoggingTensorHook(
        {'loss': loss}, every_n_iter=1, formatter=lambda values: losses.append(float(values['loss'])) or ''
    )
    host_call = {}
    if is_tpu:
        with tf.control_dependencies([train_op]):
            step = tf.reshape(tf.cast(tf.compat.v1.train.get_global_step(), tf.int32), [1])
        write = functools.partial(write_loss, model_dir=params['host_dir'])
        host_call = {'host_call': (write, [step, tf.reshape(loss, [1])])}
    return spec(mode, loss=loss, train_op=train_op, training_hooks=[record], **host_call)


def run_tpu_estimator(model_dir):
    job = estimator.tpu.TPUEstimator(
        model_fn,
        config=estimator.tpu.RunConfig(model_dir=model_dir, tpu_config=estimator.tpu.TPUConfig(iterations_per_loop=2)),
        use_tpu=False,
        train_batch_size=4,
        eval_batch_size=4,
        predict_batch_size=4,
        export_to_tpu=False,
        params={'host_dir': model_dir},
    )
    job.train(train_input_fn, max_steps=STEPS)
    metrics = job.evaluate(eval_input_fn, steps=1)
    predictions = [float(p['y'][0]) for p in job.predict(eval_input_fn)]
    export_dir = job.export_saved_model(os.path.join(model_dir, 'export'), serving_input_receiver_fn)
    served = tf.saved_model.load(export_dir.decode()).signatures['serving_default'](tf.constant(X))['y']
    return {'loss': float(metrics['loss']), 'predictions': predictions, 'served': served.numpy()[:, 0].tolist()}


def run_mirrored(model_dir):
    cpu = tf.config.list_physical_devices('CPU')[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
    config = estimator.RunConfig(model_dir=model_dir, train_distribute=strategy)
    job = estimator.Estimator(model_fn, config=config, params={})
    job.train(train_input_fn, max_steps=STEPS)
    return {'loss': float(job.evaluate(eval_input_fn)['loss'])}


def run_train_and_evaluate(model_dir, strategy):
    config = estimator.RunConfig(model_dir=model_dir, train_distribute=strategy, save_checkpoints_steps=3)
    exporter = estimator.FinalExporter('final', serving_input_receiver_fn)
    estimator.train_and_evaluate(
        estimator.Estimator(model_fn, config=config, params={}),
        estimator.TrainSpec(train_input_fn, max_steps=STEPS),
        estimator.EvalSpec(eval_input_fn, steps=1, exporters=[exporter], start_delay_secs=0, throttle_secs=0),
    )
    return {}


def main(kind, model_dir):
    if kind == 'tpu_estimator':
        result = run_tpu_estimator(model_dir)
        print(json.dumps({'tensorflow': tf.__version__, 'losses': losses, **result}))
        return
    # With eager execution on, the all-reduce between two CPU devices of one session can wait for ever on few cores.
    tf.compat.v1.disable_eager_execution()
    if kind == 'mirrored':
        result = run_mirrored(model_dir)
    elif kind == 'multi_worker':
        result = run_train_and_evaluate(model_dir, tf.distribute.experimental.MultiWorkerMirroredStrategy())
    else:
        result = run_train_and_evaluate(model_dir, None)
    print(json.dumps({'tensorflow': tf.__version__, 'losses': losses, **result}))


if __name__ == '__main__':
    main(*sys.argv[1:])
