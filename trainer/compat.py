"""The one place that names tf.estimator and tests TensorFlow versions."""

from __future__ import annotations

import tensorflow as tf

estimator = tf.compat.v1.estimator
