"""A model_fn on replicas: averages, one writer of summaries, votes that every worker sees."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf
from tests import fakes
from trainer import compat, loop, replicas, summaries
from trainer.cluster import Cluster
from trainer.config import DistributionConfig
from trainer.distribute import make_distribution
from trainer.models import mlp

replica_count = int(sys.argv[2])
settings = DistributionConfig(distribution_strategy='mirrored', num_cpu_replicas=replica_count)
distribution = make_distribution(settings, Cluster(), {})
state = loop.LoopState()
wrapping = {'state': state, 'distribution': distribution, 'is_chief': True, 'constants': {'constant': 3}}
model_fn = replicas.wrap_model_fn(mlp.model_fn, **wrapping)
seen = {'losses': [], 'steps': [], 'votes': []}

class Recorder(tf.compat.v1.train.SessionRunHook):
    def before_run(self, run_context):
        result = state.result
        vote = [0, 1] if len(seen['steps']) == 3 else [0, 0]
        fetches = [result.loss, result.step, result.votes, result.scalars['accuracy']]
        return tf.compat.v1.train.SessionRunArgs(fetches, feed_dict={result.vote: vote})

    def after_run(self, run_context, run_values):
        loss, step, votes, accuracy = run_values.results
        seen['losses'].append(float(loss)), seen['steps'].append(int(step)), seen['votes'].append([bool(v > 0) for v in votes])

params = fakes.make_params(summaries=summaries.SummaryParams(sys.argv[1] + '/train', 2))
config = compat.estimator.RunConfig(model_dir=sys.argv[1], tf_random_seed=1, train_distribute=distribution.strategy)
estimator = compat.estimator.Estimator(model_fn, config=config, params=params)

def input_fn():
    features, labels = fakes.make_blobs(512)
    dataset = tf.data.Dataset.from_tensor_slices(({'image': features}, labels))
    return dataset.repeat().batch(16 // replica_count, drop_remainder=True)

estimator.train(input_fn, max_steps=6, hooks=[Recorder()])
tags = {}
import glob
for path in glob.glob(sys.argv[1] + '/train/events*'):
    for event in tf.compat.v1.train.summary_iterator(path):
        for value in event.summary.value:
            tags.setdefault(value.tag, []).append(event.step)
print(json.dumps({**seen, 'tags': tags}))
"""


def run(folder, replica_count):
    program = subprocess.run(
        [sys.executable, '-c', PROGRAM, str(folder), str(replica_count)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads(program.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_two_replicas_make_the_steps_of_one_and_write_once(tmp_path):
    one, two = run(tmp_path / 'one', 1), run(tmp_path / 'two', 2)
    assert two['steps'] == [1, 2, 3, 4, 5, 6]
    assert two['losses'] == pytest.approx(one['losses'], rel=1e-5)
    assert two['votes'] == [[False, False]] * 3 + [[False, True]] + [[False, False]] * 2
    assert two['tags']['accuracy'] == [2, 4, 6]
    assert two['tags']['constant'] == [2, 4, 6]
    assert two['tags']['loss'] == [2, 4, 6]
