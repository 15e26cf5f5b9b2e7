"""Distributed training of a model_fn over sharded TFRecords with Estimator and TPUEstimator."""

__version__ = '0.1.0'
